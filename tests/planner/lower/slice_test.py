"""Shuffled minibatches: any rows in any order, dealt before they are made."""

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
def test_every_epoch_deals_every_group_out_once(n, group_size):
  id_ENM = minibatches.shuffle(n, 3, group_size)(KEY, ROWS)
  assert id_ENM.shape == (3, n, 24 // n)
  for id_NM in np.asarray(id_ENM):
    assert sorted(id_NM.ravel()) == list(range(24))
    groups = id_NM.reshape(n, -1, group_size)
    np.testing.assert_array_equal(
      groups % group_size, groups * 0 + np.arange(group_size)
    )
    assert (np.diff(id_NM, axis=1) > 0).all()  # Sums go in their order.


def test_epochs_and_keys_deal_differently():
  id_ENM = np.asarray(minibatches.shuffle(2, 8)(KEY, ROWS))
  other = np.asarray(minibatches.shuffle(2, 8)(jax.random.key(4), ROWS))
  assert len({x.tobytes() for x in (*id_ENM, *other)}) == 16


def test_dealing_reads_no_rows():
  deal = minibatches.shuffle(2, 2)
  np.testing.assert_array_equal(deal(KEY, ROWS), deal(KEY, ROWS * 0))


def test_a_deal_has_luck_of_its_own():
  """No key of a row is the key of an epoch."""
  seen = jax.random.key_data(stages.keys(KEY, jnp.ones(2**16)))
  own = jax.random.key_data(jax.random.fold_in(KEY, core.SHUFFLE))
  assert not (seen == own[None]).all(1).any()


def test_minibatches_are_the_rows_that_were_dealt():
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


def test_groups_that_end_about_the_same_time_arrive_together():
  # Groups of two end after 5, 3, 9, 3, 4 and 7 tokens.
  mask_BT = mask([5, 1, 3, 3, 2, 9, 3, 2, 4, 4, 7, 6])
  id_ENM = minibatches.by_arrival(3, 2, 2)(mask_BT, None)
  first = [[2, 3, 6, 7], [0, 1, 8, 9], [4, 5, 10, 11]]
  assert id_ENM.tolist() == [first, first]
  # Of those that end at once, the first in the batch.
  tied = minibatches.by_arrival(2, 1, 1)(mask([4, 4, 2, 4]), None)
  assert tied.tolist() == [[[0, 2], [1, 3]]]


def test_who_knows_when_rows_ended_may_say_so():
  arrival_B = jnp.array([7, 0, 0, 0, 1, 2])
  id_ENM = minibatches.by_arrival(3, 1, 2)(mask([1, 2, 3, 4, 5, 6]), arrival_B)
  assert id_ENM.tolist() == [[[2, 3], [4, 5], [0, 1]]]


def test_an_arrival_is_after_generation_and_other_deals_are_before():
  made = grpo(num_minibatches=2, minibatch_by='arrival')
  (generate,) = [node for node in made.nodes if node.name == 'generate']
  (arrival,) = [node for node in made.nodes if node.name == 'minibatch_ids']
  assert {*arrival.reads} <= {*generate.writes}
  assert calls(cut.cut(made, 2), 'gradient') == 2


def test_a_membership_that_is_none_is_refused():
  with pytest.raises(ValueError, match="not 'alphabet'"):
    grpo(minibatch_by='alphabet')


@pytest.mark.parametrize('n, group_size', [(5, 1), (3, 16)])
def test_a_deal_that_would_break_a_group_is_refused(n, group_size):
  with pytest.raises(
    ValueError, match=f'24 rows .* multiple of {n * group_size}'
  ):
    minibatches.shuffle(n, 1, group_size)(KEY, ROWS)


def grpo(**kwargs):
  workflow = workflows.grpo(
    tiny.policy(), tiny.even, optimizers.adamw(1e-2), group_size=4, **kwargs
  )
  return tiny.trace(workflow, tiny.problem())


def calls(made, name):
  return sum(node.name == name for node in made.nodes)


@pytest.mark.parametrize(
  'pieces, updates, each', [(2, 1, 2), (4, 2, 2), (8, 2, 4), (2, 4, 1)]
)
def test_minibatches_are_cut_into_pieces_as_large_as_the_others(
  pieces, updates, each
):
  made = cut.cut(
    grpo(num_minibatches=updates, num_epochs=2, minibatch_by='shuffled'), pieces
  )
  assert calls(made, 'generate') == pieces
  assert calls(made, 'gradient') == 2 * updates * each
  assert calls(made, 'minibatch_ids') == calls(made, 'minibatches') == 1
  assert calls(made, 'apply') == 2 * updates
  sizes = {
    made.values[v].shape[0]
    for node in made.nodes
    if node.name == 'gradient'
    for v in node.rows
  }
  assert sizes == {32 // updates // each}


def test_runs_that_pieces_do_not_divide_stay_whole():
  add = stages.Stage(lambda x: x.sum(), 'add', 'sum')
  deal, shuffled = minibatches.shuffle(3, 1), minibatches.gather()

  def step(state, x, key):
    return state, [add(run) for run in shuffled(deal(key, x), x)]

  made = flow.trace(step, (), jnp.zeros(24), KEY)
  assert calls(cut.cut(made, 4), 'add') == 3
  assert calls(cut.cut(made, 6), 'add') == 6


def test_a_deal_is_made_before_a_token_is():
  made = grpo(minibatch_by='shuffled')
  (shuffle,) = [node for node in made.nodes if node.name == 'minibatch_ids']
  (generate,) = [node for node in made.nodes if node.name == 'generate']
  assert not set(shuffle.reads) & set(generate.writes)
  (key,) = [v for v in made.inputs if not made.values[v].shape]
  assert key in shuffle.reads


def test_work_of_a_slice_can_be_counted():
  works = count.of_flow(
    grpo(num_minibatches=2, num_epochs=2, minibatch_by='shuffled')
  )
  assert works['minibatches'].full_batch.bytes_out > 0
