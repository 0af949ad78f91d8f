"""Shuffled minibatches: any rows in any order, dealt before they are made."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from planner.counting import count
from planner.ir import flow
from planner.lower import cut
import stages
from stages import core, workflows
from stages.learn import minibatches, optimizers
import tiny

KEY = jax.random.key(3)
ROWS = jnp.arange(24)


@pytest.mark.parametrize(
  'n, group_size', [(1, 1), (2, 4), (3, 2), (6, 4), (24, 1)]
)
def test_every_epoch_contains_every_group_once(n, group_size):
  id_ENM = minibatches.shuffle(n, 3, group_size)(KEY, ROWS)
  assert id_ENM.shape == (3, n, 24 // n)
  for id_NM in np.asarray(id_ENM):
    assert sorted(id_NM.ravel()) == list(range(24))
    groups = id_NM.reshape(n, -1, group_size)
    np.testing.assert_array_equal(
      groups % group_size, groups * 0 + np.arange(group_size)
    )
    assert (np.diff(id_NM, axis=1) > 0).all()  # Sums go in their order.


def test_epochs_and_keys_shuffle_differently():
  id_ENM = np.asarray(minibatches.shuffle(2, 8)(KEY, ROWS))
  other = np.asarray(minibatches.shuffle(2, 8)(jax.random.key(4), ROWS))
  assert len({x.tobytes() for x in (*id_ENM, *other)}) == 16


def test_shuffling_does_not_depend_on_the_values_of_rows():
  shuffle = minibatches.shuffle(2, 2)
  np.testing.assert_array_equal(shuffle(KEY, ROWS), shuffle(KEY, ROWS * 0))


def test_the_key_of_shuffling_is_not_the_key_of_a_row():
  """No key of a row is the key of an epoch."""
  row_keys = jax.random.key_data(stages.keys(KEY, jnp.ones(2**16)))
  own = jax.random.key_data(jax.random.fold_in(KEY, core.SHUFFLE))
  assert not (row_keys == own[None]).all(1).any()


def test_minibatches_are_the_rows_of_their_ids():
  tree = {'x': ROWS[:, None] * 10, 'y': (ROWS,)}
  id_ENM = jnp.array([[[0, 1], [4, 5]], [[2, 3], [0, 1]]])
  runs = minibatches.gather(2)(id_ENM, tree)
  assert [run['y'][0].tolist() for run in runs] == [
    [0, 1], [4, 5], [2, 3], [0, 1]
  ]  # fmt: skip
  for run in runs:
    np.testing.assert_array_equal(run['x'][:, 0], 10 * run['y'][0])


def mask(lengths, T=9):
  return (np.arange(T)[None] < np.array(lengths)[:, None]).astype(np.float32)


def test_by_arrival_groups_that_end_together_share_a_minibatch():
  # Groups of two end after 5, 3, 9, 3, 4 and 7 tokens.
  mask_BT = mask([5, 1, 3, 3, 2, 9, 3, 2, 4, 4, 7, 6])
  id_ENM = minibatches.by_arrival(3, 2, 2)(mask_BT, None)
  first = [[2, 3, 6, 7], [0, 1, 8, 9], [4, 5, 10, 11]]
  assert id_ENM.tolist() == [first, first]
  # Of those that end at once, the first in the batch.
  tied = minibatches.by_arrival(2, 1, 1)(mask([4, 4, 2, 4]), None)
  assert tied.tolist() == [[[0, 2], [1, 3]]]


def test_by_arrival_uses_given_times_of_arrival():
  arrival_B = jnp.array([7, 0, 0, 0, 1, 2])
  id_ENM = minibatches.by_arrival(3, 1, 2)(mask([1, 2, 3, 4, 5, 6]), arrival_B)
  assert id_ENM.tolist() == [[[2, 3], [4, 5], [0, 1]]]


def test_ids_by_arrival_are_computed_after_generation():
  recorded = grpo(num_minibatches=2, minibatch_by='arrival')
  (generate,) = [node for node in recorded.nodes if node.name == 'generate']
  (arrival,) = [node for node in recorded.nodes if node.name == 'minibatch_ids']
  assert {*arrival.reads} <= {*generate.writes}
  assert calls(cut.cut(recorded, 2), 'gradient') == 2


def test_an_unknown_minibatch_by_is_refused():
  with pytest.raises(ValueError, match="not 'alphabet'"):
    grpo(minibatch_by='alphabet')


@pytest.mark.parametrize('n, group_size', [(5, 1), (3, 16)])
def test_minibatches_that_would_split_a_group_are_refused(n, group_size):
  rows = f'a multiple of {n} groups, which is {n * group_size} rows'
  with pytest.raises(ValueError, match=f'24 rows .* {rows}'):
    minibatches.shuffle(n, 1, group_size)(KEY, ROWS)


@functools.cache
def grpo(**kwargs):
  workflow = workflows.grpo(
    tiny.policy(), tiny.even, optimizers.adamw(1e-2), group_size=4, **kwargs
  )
  return tiny.trace(workflow, tiny.problem())


def calls(recorded, name):
  return sum(node.name == name for node in recorded.nodes)


@pytest.mark.parametrize(
  'pieces, updates, each', [(2, 1, 2), (4, 2, 2), (8, 2, 4), (2, 4, 1)]
)
def test_minibatches_are_cut_into_pieces_as_large_as_the_others(
  pieces, updates, each
):
  recorded = cut.cut(
    grpo(num_minibatches=updates, num_epochs=2, minibatch_by='shuffled'), pieces
  )
  assert calls(recorded, 'generate') == pieces
  assert calls(recorded, 'gradient') == 2 * updates * each
  assert calls(recorded, 'minibatch_ids') == calls(recorded, 'minibatches') == 1
  assert calls(recorded, 'apply') == 2 * updates
  sizes = {
    recorded.values[v].shape[0]
    for node in recorded.nodes
    if node.name == 'gradient'
    for v in node.rows
  }
  assert sizes == {32 // updates // each}


def test_minibatches_that_pieces_do_not_divide_stay_whole():
  add = stages.Stage(lambda x: x.sum(), 'add', 'sum')
  shuffle, shuffled = minibatches.shuffle(3, 1), minibatches.gather()

  def step(state, x, key):
    return state, [add(run) for run in shuffled(shuffle(key, x), x)]

  recorded = flow.trace(step, (), jnp.zeros(24), KEY)
  assert calls(cut.cut(recorded, 4), 'add') == 3
  assert calls(cut.cut(recorded, 6), 'add') == 6


def test_shuffled_ids_are_computed_before_generation():
  recorded = grpo(minibatch_by='shuffled')
  (shuffle,) = [node for node in recorded.nodes if node.name == 'minibatch_ids']
  (generate,) = [node for node in recorded.nodes if node.name == 'generate']
  assert not set(shuffle.reads) & set(generate.writes)
  (key,) = [v for v in recorded.inputs if not recorded.values[v].shape]
  assert key in shuffle.reads


def test_work_of_a_slice_can_be_counted():
  works = count.of_flow(
    grpo(num_minibatches=2, num_epochs=2, minibatch_by='shuffled')
  )
  assert works['minibatches'].full_batch.bytes_out > 0
