"""Values in host memory: which a call updates there, and which move."""

import pytest

from planner.ir import plan
from planner.lower import offloading, passes, program
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
      # What is replaced may be overwritten.
      assert {v for v, _ in op.streamed} <= {*op.donate}
  assert sum(bool(getattr(op, 'streamed', ())) for op in programs['all']) == (
    num_minibatches
  )


def test_a_plan_without_offloads_streams_nothing():
  graph = lowered_flows.grpo()
  _, programs = passes.lower(graph, plan.one_place(graph.stages))
  assert not any(getattr(op, 'streamed', ()) for op in programs['all'])
