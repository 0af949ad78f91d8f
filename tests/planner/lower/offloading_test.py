"""Values in host memory: which a call updates there, and which move."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from planner.ir import flow, plan
from planner.lower import offloading, passes, program, unroll
import stages
from stages import repeat
from tests.planner import loops
from tests.planner.lower import lowered_flows


def moments(graph):
  """Carried arrays of an optimizer, at the start and at the end of a step."""
  return {
    start: end
    for start, end in graph.carry
    if 'opt_state' in graph.values[start].name and graph.values[start].shape
  }


@pytest.mark.parametrize('num_minibatches', [1, 4])
def test_each_update_replaces_the_moments_of_the_one_before(num_minibatches):
  graph = lowered_flows.grpo(num_minibatches=num_minibatches)
  found = offloading.streamed(graph, ['apply'])
  assert len(found) == num_minibatches
  assert {graph.nodes[i].name for i in found} == {'apply'}
  own = moments(graph)
  assert own
  for start, end in own.items():
    now = start
    for i in sorted(found):
      now = found[i].pop(now)
    assert now == end
  assert not any(found.values())


def test_nothing_is_updated_in_host_memory_that_others_read():
  graph = lowered_flows.grpo()
  assert offloading.streamed(graph, ['gradient']) == {}
  assert offloading.streamed(graph, []) == {}
  for pairs in offloading.streamed(graph, ['apply']).values():
    assert all(len(graph.readers[v]) == 1 for v in pairs)


@pytest.mark.parametrize('num_minibatches', [1, 2])
def test_moments_are_never_restored_as_a_whole(num_minibatches):
  graph = lowered_flows.grpo(num_minibatches=num_minibatches)
  chosen = plan.parse({'offload': ['apply']}, graph.stages)
  cut, programs = passes.lower(graph, chosen)
  own = moments(cut)
  for op in programs['all']:
    if isinstance(op, program.Restore | program.Offload):
      assert op.value not in {*own, *own.values()}
      assert not cut.values[op.value].shape
    if isinstance(op, program.Run) and op.streamed:
      assert cut.nodes[op.node].name == 'apply'
      # Replaced values may be overwritten.
      assert {v for v, _ in op.streamed} <= {*op.donate}
  assert sum(bool(getattr(op, 'streamed', ())) for op in programs['all']) == (
    num_minibatches
  )


def test_a_plan_without_offloads_streams_nothing():
  graph = lowered_flows.grpo()
  _, programs = passes.lower(graph, plan.one_place(graph.stages))
  assert not any(getattr(op, 'streamed', ()) for op in programs['all'])


@pytest.mark.parametrize('kept_twice', [False, True])
def test_what_others_read_under_another_name_stays_on_the_device(kept_twice):
  """The acting version is that of the step before, or a copy of the newest."""
  act = stages.Stage(lambda w, x: x + w, 'act', unbatched=(0,))
  apply = stages.Stage(lambda w: w + 1, 'apply', 'batch')

  def step(state, x, key):
    del key
    acting, newest, alone = state
    after = apply(newest)
    kept = after if kept_twice else newest
    return (kept, after, apply(alone)), act(acting, x)

  w = jax.ShapeDtypeStruct((), jnp.float32)
  graph = flow.trace(
    step,
    (w, w, w),
    jax.ShapeDtypeStruct((8, 2), jnp.float32),
    jax.eval_shape(lambda: jax.random.key(0)),
  )
  (_, _), (_, _), (start, end) = graph.carry
  assert offloading.private(graph, ['apply']) == {start: end}


def test_what_only_the_stages_of_a_loop_read_is_offloaded():
  def body(carry, w):
    n, x_B = carry
    n, done = loops.count(n, n)
    return (n, loops.grow(loops.halve(x_B), loops.weigh(w))), done

  loop = repeat.Repeat(body, 'loop', at_most=3)

  def step(w, inputs):
    x_B, most = inputs
    return w, loop((loops.zero(most), x_B), w)

  graph = loops.trace(step, jnp.ones(4))
  ((start, _),) = graph.carry
  for some in (graph, unroll.unroll(graph)):
    assert offloading.private(some, ['weigh']) == {start: start}
    assert not offloading.private(some, ['grow'])
  chosen = plan.one_place(graph.stages)
  chosen = dataclasses.replace(chosen, offload=('weigh',))
  (ops,) = passes.lower(graph, chosen)[1].values()
  kinds = [type(op).__name__ for op in ops]
  at = kinds.index('Repeat')
  assert ops[at - 1] == program.Restore(start)
  assert program.Offload(start) in ops[at:]


@pytest.mark.parametrize('seed', range(10))
def test_no_loop_hides_a_reader(seed):
  _, graph, *_ = loops.random_case(seed)
  unrolled = unroll.unroll(graph)
  for stage in graph.stages:
    found = offloading.private(graph, [stage]).keys()
    assert found <= offloading.private(unrolled, [stage]).keys()
