import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from planner.ir import cost, flow, graph, plan
from planner.lower import cut, order
import stages
from stages import workflows
from stages.learn import optimizers
import tiny


def play(recorded: graph.Flow, state, inputs):
  """Runs a flow's nodes in their order."""
  starts = [start for start, _ in recorded.carry]
  known = dict(zip(starts, jax.tree.leaves(state), strict=True))
  known |= zip(recorded.inputs, jax.tree.leaves(inputs), strict=True)
  for node in recorded.nodes:
    args = [known[v] for v in node.reads]
    if node.in_tree is not None:
      args = jax.tree.unflatten(node.in_tree, args)
    known |= zip(
      node.writes, jax.tree.leaves(node.stage.run(*args)), strict=True
    )
  for v, x in known.items():
    assert x.shape == recorded.values[v].shape, recorded.values[v].name
  return [known[end] for _, end in recorded.carry], [
    known[v] for v in recorded.outputs
  ]


def close(got, want):
  for one, other in zip(
    jax.tree.leaves(got), jax.tree.leaves(want), strict=True
  ):
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('pieces', [2, 4])
@pytest.mark.parametrize('seed', range(30))
def test_a_cut_flow_computes_the_same(seed, pieces):
  rng = np.random.default_rng(seed)
  state, batch = (
    [jnp.asarray(rng.normal(size=4), jnp.float32) for _ in range(n)]
    for n in (rng.integers(1, 5), rng.integers(1, 3))
  )
  key, step = jax.random.key(0), tiny.random_step(seed)
  recorded = flow.trace(step, state, batch, key)
  pieced = cut.cut(recorded, pieces)
  close(play(pieced, state, (batch, key)), step(state, batch, key))
  # An order that another plan would choose computes the same.
  names = recorded.stages
  spread = plan.Plan(
    {f'p{i}': plan.Placement((i,)) for i in range(3)},
    {name: f'p{rng.integers(3)}' for name in names},
  )
  other = order.order(pieced, spread, cost.UNIT)
  assert sorted(map(str, other.nodes)) == sorted(map(str, pieced.nodes))
  close(play(other, state, (batch, key)), step(state, batch, key))


@functools.cache
def grpo(num_minibatches=1):
  workflow = workflows.grpo(
    tiny.policy(),
    tiny.even,
    optimizers.adamw(1e-2),
    group_size=4,
    num_minibatches=num_minibatches,
  )
  return tiny.trace(workflow, tiny.problem())


def count(recorded):
  names = [node.name for node in recorded.nodes]
  return {name: names.count(name) for name in dict.fromkeys(names)}


def test_row_stages_are_repeated_for_every_piece_and_batch_stages_are_not():
  calls = count(cut.cut(grpo(), 4))
  for name in 'generate reward group_advantage measure gradient'.split():
    assert calls[name] == 4, name
  for name in 'repeat keys apply'.split():
    assert calls[name] == 1, name
  assert 'minibatches' not in calls  # Runs of rows are runs of pieces.


def test_minibatches_divide_the_pieces_among_them():
  calls = count(cut.cut(grpo(num_minibatches=2), 4))
  assert calls['gradient'] == 4
  assert calls['apply'] == 2


def test_a_piece_passes_all_stages_before_the_next():
  nodes = cut.cut(grpo(), 4).nodes
  order_of_pieces = [
    n.piece[0] for n in nodes if n.name in ('generate', 'gradient')
  ]
  assert order_of_pieces == [0, 0, 1, 1, 2, 2, 3, 3]


def test_one_piece_is_the_flow_itself():
  assert cut.cut(grpo(), 1) is grpo()


@pytest.mark.parametrize('pieces', [3, 16])
def test_a_piece_that_would_split_a_group_is_refused(pieces):
  with pytest.raises(
    ValueError, match=f'groups of 4, .* cut into {pieces} pie'
  ):
    cut.cut(grpo(), pieces)


def test_sums_add_up_in_the_order_of_their_rows():
  first = stages.Stage(lambda x: {'text': x[:1]}, 'first', 'sum')
  object.__setattr__(first, 'merge', lambda a, b: a)
  recorded = flow.trace(
    lambda s, x, key: (s, first(x)), (), jnp.arange(8), key()
  )
  (_, outputs) = play(cut.cut(recorded, 4), (), (jnp.arange(8), key()))
  assert outputs[0].tolist() == [0]


def key():
  return jax.random.key(0)


def test_rows_in_different_numbers_of_parts_are_refused():
  stage = functools.partial(stages.Stage, grain='row')
  one = stage(lambda x: x + 1, 'one')
  both = stage(lambda x, y: x + y, 'both')
  halves = stages.Stage(
    lambda x: (x[: x.shape[0] // 2], x[x.shape[0] // 2 :]), 'halves', 'split'
  )

  def step(state, x, y, key):
    del key
    first, second = halves(one(x))
    return state, (both(first, one(y)), second)

  recorded = flow.trace(
    step,
    jnp.zeros(()),
    jnp.zeros((16, 2)),
    jnp.zeros((8, 2)),
    jax.random.key(0),
  )
  assert cut.cut(recorded, 1)
  with pytest.raises(
    ValueError, match='both reads rows .* into .* and .* parts'
  ):
    cut.cut(recorded, 2)
