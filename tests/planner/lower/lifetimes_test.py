"""Values are dropped, donated, overwritten and offloaded in time."""

import pytest

from planner.costs.mesh import memory
from planner.ir import graph as graph_lib
from planner.ir import plan
from planner.lower import lifetimes, passes, program
from tests.planner.lower import lowered_flows


@lowered_flows.each_flow
def test_nothing_is_held_after_its_last_use(make):
  graph = make()
  stays = {start for start, end in graph.carry if start == end}
  needed, needs = set(stays), [set(stays)]  # After each, backwards.
  for op in reversed(lowered_flows.lower(graph)):
    match op:
      case program.Run(i, _):
        needed |= set(graph.nodes[i].reads)
        needed -= set(graph.nodes[i].writes)
      case program.Keep(v, _) | program.Send(v, _):
        needed |= {v}
      case program.Recv(v, _):
        needed -= {v}
    needs.append(set(needed))
  live = {start for start, _ in graph.carry}
  for op in lowered_flows.lower(graph):
    need = needs.pop()
    match op:
      case program.Run(i, donate):
        assert live == need
        live = (live | set(graph.nodes[i].writes)) - set(donate)
      case program.Keep() | program.Send():
        assert live == need
      case program.Recv(v, _):
        live |= {v}
      case program.Drop(v):
        assert v not in need
        live -= {v}
  assert live == needs.pop()


@lowered_flows.each_flow
def test_only_values_that_the_runtime_owns_are_donated(make):
  graph = make()
  sums = {
    v for node in graph.nodes if node.stage.grain == 'sum' for v in node.writes
  }
  starts = {start for start, _ in graph.carry}
  versions = lifetimes.versions(graph, range(len(graph.nodes)), starts)
  assert set(versions.values()) <= starts
  owned = sums | starts | {*versions}
  for op in lowered_flows.lower(graph):
    if isinstance(op, program.Run):
      assert set(op.donate) <= set(graph.nodes[op.node].reads) & owned


def test_the_optimizer_overwrites_its_state_and_the_gradient():
  graph = lowered_flows.sft()
  (apply,) = [node for node in graph.nodes if node.name == 'apply']
  run = next(
    op
    for op in lowered_flows.lower(graph)
    if isinstance(op, program.Run) and graph.nodes[op.node] is apply
  )
  assert set(run.donate) == set(apply.reads)


@pytest.mark.parametrize('kl_coef', [0.0, 0.1])
def test_each_of_several_updates_overwrites_the_state_before_it(kl_coef):
  graph = lowered_flows.grpo(kl_coef, num_minibatches=4)
  runs = [
    op
    for op in lowered_flows.lower(graph)
    if isinstance(op, program.Run) and graph.nodes[op.node].name == 'apply'
  ]
  assert len(runs) == 4
  for run in runs:
    assert set(run.donate) == set(graph.nodes[run.node].reads)


def held(graph, chosen):
  """Bytes of values during each node, as a program of one place has them."""
  live = {start for start, _ in graph.carry}
  found, size = {}, lambda vs: sum(graph.values[v].bytes for v in vs)
  for op in lowered_flows.lower(graph):
    match op:
      case program.Run(i, donate):
        writes = graph.nodes[i].writes
        kinds = [lifetimes._kind(graph, v) for v in writes]
        reused = []
        for v in donate:
          if (kind := lifetimes._kind(graph, v)) in kinds:
            kinds.remove(kind)
            reused.append(v)
        found[i] = size(live) + size(writes) - size(reused)
        live = live.union(writes) - set(donate)
      case program.Recv(v, _):
        live.add(v)
      case program.Drop(v):
        live.discard(v)
  return found


@pytest.mark.parametrize('num_minibatches', [1, 2, 4])
@pytest.mark.parametrize('kl_coef', [0.0, 0.1])
def test_memory_is_modeled_as_the_program_holds_it(kl_coef, num_minibatches):
  graph = lowered_flows.grpo(kl_coef, num_minibatches)
  chosen = plan.one_place(graph.stages)
  modeled = memory.MemoryModel({}, None).alive(graph, chosen, 'all')
  state = sum(graph.values[start].bytes for start, _ in graph.carry)
  for i, needed in held(graph, chosen).items():
    values = sum(graph.values[v].bytes for v in modeled[i])
    assert values == pytest.approx(needed, abs=0.005 * state), graph.nodes[i]


def test_parameters_that_are_read_later_are_not_overwritten():
  graph = lowered_flows.grpo(num_minibatches=2)
  last = {}
  for i, node in enumerate(graph.nodes):
    last |= dict.fromkeys(node.reads, i)
  donated = [
    (op.node, v) for op in lowered_flows.lower(graph)
    if isinstance(op, program.Run) for v in op.donate
  ]  # fmt: skip
  assert donated
  assert all(last[v] == i for i, v in donated)


def test_an_unchanged_value_is_not_kept_again():
  graph = graph_lib.Flow((), tuple('abc'), (), (), ((0, 0), (1, 2)), None)
  keeps = [
    op for op in lowered_flows.lower(graph) if isinstance(op, program.Keep)
  ]
  assert keeps == [program.Keep(2, 1)]


def test_numbers_of_an_offloaded_stage_are_there_around_its_call():
  """Its arrays are not even there then: see offloading_test."""
  graph = lowered_flows.sft()
  chosen = plan.Plan(
    {'a': plan.Placement()},
    dict.fromkeys(graph.stages, 'a'),
    offload=('apply',),
  )
  _, programs = passes.lower(graph, chosen)
  ops = programs['a']
  kinds = [type(op).__name__ for op in ops if type(op).__name__ != 'Drop']
  restored = {op.value for op in ops if isinstance(op, program.Restore)}
  offloaded = {op.value for op in ops if isinstance(op, program.Offload)}
  ends = dict(graph.carry)
  read = {start for start in ends if start in graph.nodes[0].reads}
  # All but the parameters, which the gradient reads too.
  assert restored == {
    v for v in ends.keys() - read if not graph.values[v].shape
  }
  assert offloaded == {ends[v] for v in restored}
  runs = [i for i, kind in enumerate(kinds) if kind == 'Run']
  first = kinds.index('Restore')
  assert runs[0] < first < runs[1] < kinds.index('Offload')
