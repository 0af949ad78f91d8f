import dataclasses
import functools
import pathlib
import subprocess
import sys

import numpy as np
import optax
import pytest

from planner.ir import plan
from planner.lower import cut, offloading, passes, program
from stages import workflows
from tests.planner.lower import lowered_flows
import tiny
import toys

ROOT = pathlib.Path(__file__).parents[3]


@dataclasses.dataclass(eq=False)
class Buffer:
  """Memory that holds a symbol until a stage overwrites it."""

  holds: object
  overwritten: bool = False


@functools.cache
def symbol(*what):
  """One object for each meaning, as expressions share their parts."""
  return object()


def meaning(graph, state, inputs):
  """State and outputs as symbols, by following edges alone."""
  known = dict(zip((start for start, _ in graph.carry), state, strict=True))
  known |= zip(graph.inputs, inputs, strict=True)
  for node in graph.nodes:
    args = tuple(known[v] for v in node.reads)
    known |= {v: symbol(v, *args) for v in node.writes}
  ends = [known[end] for _, end in graph.carry]
  return ends, [known[v] for v in graph.outputs]


class Site:
  """A place that refuses what a runtime could not do."""

  def __init__(
    self, graph, name, instructions, memory, links, inputs, sink, taken
  ):
    self.graph, self.name, self.memory = graph, name, memory
    self.left, self.kept = list(instructions), {}
    self.links, self.inputs, self.sink = links, inputs, sink
    self.shares = program.Release() in instructions
    self.away = set(memory) if self.shares else set()
    self.taken, self.has = taken, None

  def advance(self) -> bool:
    """Does the next instruction; False if it must wait."""
    op = self.left[0]
    match op:
      case program.Run(i, donate, streamed):
        self.run(self.graph.nodes[i], donate, dict(streamed))
      case program.Send(v, target):
        assert not self.memory[v].overwritten
        if target == program.SINK:
          self.sink[v] = self.memory[v]
        else:  # Another place has a copy of its own.
          copy = Buffer(self.memory[v].holds)
          self.links.setdefault((v, self.name, target), []).append(copy)
      case program.Recv(v, source):
        assert v not in self.memory
        link = self.links.get((v, source, self.name), [])
        if source == program.SOURCE:
          self.memory[v] = self.inputs[v]
        elif link:
          self.memory[v] = link.pop(0)
        else:
          assert not self.has, 'It has what another may need.'
          return False
        if self.shares:
          self.away.add(v)
      case program.Keep(end, start):
        assert start not in self.kept
        self.kept[start] = self.memory[end]
      case program.Drop(v):
        del self.memory[v]
      case program.Acquire(devices, _, values):
        if not self.has and devices in self.taken:
          return False
        self.has = devices
        self.taken.add(devices)
        self.away -= self.memory.keys() & set(values)
      case program.Release(v, source):
        if v is None or not self.links.get((v, source, self.name)):
          self.away.update(self.memory)
          self.taken.discard(self.has)
          self.has = None
      case program.Offload(v):
        assert v in self.memory
        self.away.add(v)
      case program.Restore(v):
        assert v in self.memory
        self.away.discard(v)
    self.left.pop(0)
    return True

  def run(self, node, donate, streamed):
    assert self.away.isdisjoint({*node.reads} - streamed.keys())
    assert self.away.issuperset(streamed) or not self.shares
    assert self.has or not self.shares
    buffers = [self.memory[v] for v in node.reads]
    assert not any(buffer.overwritten for buffer in buffers)
    args = tuple(buffer.holds for buffer in buffers)
    for v in donate:
      self.memory.pop(v).overwritten = True
    written = {v: Buffer(symbol(v, *args)) for v in node.writes}
    assert self.memory.keys().isdisjoint(written)
    self.memory |= written
    self.away.update(streamed.values())


def play(graph, programs, memories, inputs):
  """Runs a step of every program on buffers.

  Returns:
    Outputs, and what each place starts the next step from.
  """
  links, sink, taken = {}, {}, set()
  inputs = dict(zip(graph.inputs, inputs, strict=True))
  sites = [
    Site(graph, name, program_, memories[name], links, inputs, sink, taken)
    for name, program_ in programs.items()
  ]
  while any(site.left for site in sites):
    before = sum(len(site.left) for site in sites)
    for site in sites:
      while site.left and site.advance():
        pass
    assert sum(len(site.left) for site in sites) < before, 'They wait for ever.'
  assert not any(links.values()), 'What was sent is received.'
  assert not taken, 'What was taken is let go.'
  starts = {start for start, _ in graph.carry}
  stays = {start for start, end in graph.carry if start == end}
  for site in sites:
    assert set(site.memory) <= stays, 'Nothing is left but what stays.'
    site.memory |= site.kept
    assert set(site.memory) <= starts
  return [sink[v] for v in graph.outputs], {s.name: s.memory for s in sites}


def random_plan(graph, seed, shared=False):
  """One to four places, one to four pieces where rows allow, offloads.

  Where devices are `shared`, there are two of them at most.
  """
  rng = np.random.default_rng(seed)
  n = int(rng.integers(1, 5))
  places = {f'p{i}': plan.Placement((i,)) for i in range(n)}
  if shared:
    n = max(2, n)
    places = {f'p{i}': plan.Placement((i % (n // 2),)) for i in range(n)}
  stages = {name: f'p{rng.integers(n)}' for name in graph.stages}
  offload = tuple(name for name in graph.stages if rng.random() < 0.2)
  pieces = int(rng.choice([1, 2, 4]))
  share = tuple(reversed(places)) if shared else ()
  return plan.Plan(
    places, stages, pieces=pieces, offload=offload, shared_devices=share
  )


def follow(graph, chosen):
  """Plays three steps of a plan and holds them to what the flow means."""
  resident = program.homes(graph, chosen)
  graph, programs = passes.lower(graph, chosen, resident=resident)
  starts = [start for start, _ in graph.carry]
  state = [symbol('state', i) for i in range(len(starts))]
  memories = {name: {} for name in chosen.places}
  for i, v in enumerate(starts):
    for name in resident[v]:
      memories[name][v] = Buffer(state[i])
  given, wanted = [], []
  for step in range(3):
    inputs = [symbol('input', step, i) for i in range(len(graph.inputs))]
    state, outputs = meaning(graph, state, inputs)
    lent = [Buffer(x) for x in inputs]
    sent, memories = play(graph, programs, memories, lent)
    for i, v in enumerate(starts):
      for name in resident[v]:
        assert memories[name][v].holds == state[i]
    given += [*lent, *sent]
    wanted += [*inputs, *outputs]
  # Lent and donated arrays are unchanged, and so is the state.
  assert [buffer.holds for buffer in given] == wanted
  kept = [buffer for memory in memories.values() for buffer in memory.values()]
  assert not any(buffer.overwritten for buffer in [*given, *kept])


@lowered_flows.each_flow
def test_the_program_of_one_place_computes_its_flow(make):
  graph = make()
  follow(graph, plan.one_place(graph.stages))


@lowered_flows.each_flow
@pytest.mark.parametrize('seed', range(4))
def test_programs_of_several_places_compute_their_flow(make, seed):
  graph = make()
  follow(graph, random_plan(graph, seed))


@lowered_flows.each_flow
@pytest.mark.parametrize('seed', range(4))
def test_places_that_share_devices_compute_their_flow_and_wait_without_them(
  make, seed
):
  graph = make()
  follow(graph, random_plan(graph, seed, shared=True))


def test_a_stage_without_a_place_is_refused():
  graph = lowered_flows.sft()
  refused = r"no place for \['apply'\].*'gradient'"
  with pytest.raises(ValueError, match=refused):
    program.lower(graph, plan.one_place(['gradient', 'padding']))


@pytest.mark.parametrize('rows', [0, -4, 3, 5, 6, 64])
def test_rows_that_do_not_divide_into_whole_groups_are_refused(rows):
  with pytest.raises(
    ValueError, match='32 rows, in groups of 4.*divisor of 32'
  ):
    lowered_flows.lower(lowered_flows.grpo(), micro_batch={'gradient': rows})


@pytest.mark.parametrize('rows', [1, 2, 4, 8, 16, 32])
def test_whole_groups_and_equal_parts_of_one_are_accepted(rows):
  assert lowered_flows.lower(
    lowered_flows.grpo(), micro_batch={'gradient': rows, 'generate': rows}
  )


@pytest.mark.parametrize('stage', ['apply', 'repeat', 'minibatches'])
def test_micro_batches_of_stages_that_cannot_be_cut_are_refused(stage):
  with pytest.raises(ValueError, match=f'rows of {stage} at once.* only JAX'):
    lowered_flows.lower(lowered_flows.grpo(), micro_batch={stage: 4})


def test_micro_batches_of_a_host_stage_are_refused():
  workflow = workflows.grpo(
    tiny.policy(), tiny.even_on_host, optax.sgd(1.0), group_size=4
  )
  graph = tiny.trace(workflow, tiny.problem())
  with pytest.raises(ValueError, match='rows of reward at once.* only JAX'):
    lowered_flows.lower(graph, micro_batch={'reward': 4})


def test_a_value_is_sent_as_soon_as_it_is_computed():
  graph = lowered_flows.sft()
  places = {'a': plan.Placement((0,)), 'b': plan.Placement((1,))}
  spread = plan.Plan(places, {'gradient': 'a', 'apply': 'b', 'padding': 'b'})
  _, programs = passes.lower(graph, spread)
  (gradient,) = [i for i, n in enumerate(graph.nodes) if n.name == 'gradient']
  ops = list(programs['a'])
  (at,) = [i for i, op in enumerate(ops) if isinstance(op, program.Run)]
  writes = graph.nodes[gradient].writes
  sent = [op for op in ops[at + 1 :] if isinstance(op, program.Send)]
  assert sent == [program.Send(v, 'b') for v in writes]
  # Parameters come back as soon as they are made, and wait for the next step.
  (apply,) = [i for i, n in enumerate(graph.nodes) if n.name == 'apply']
  back = {op.value for op in programs['b'] if op[1:] == ('a',)} - set(writes)
  params = {end for start, end in graph.carry if start in graph.nodes[0].reads}
  assert back == params <= set(graph.nodes[apply].writes)


def test_a_plan_is_lowered_without_jax(tmp_path):
  code = (
    'import sys\n'
    'from planner.ir import graph, plan\n'
    'from planner.lower import cut, order, passes, program\n'
    'from planner.simulation import simulate\n'
    'assert "jax" not in sys.modules, "jax"'
  )
  done = subprocess.run(
    [sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True
  )
  assert done.returncode == 0, done.stderr


@pytest.mark.parametrize('pieces', [1, 2])
def test_private_values_of_a_stage_do_not_depend_on_pieces(pieces):
  # The plumbing that splits a carried value reads it for them.
  flow = toys.build(
    [('a', 'row', ('batch', 'state.b')), ('b', 'row', ('a',))], ('b',)
  )
  rows = frozenset(v for v, value in enumerate(flow.values[:2]))
  first = dataclasses.replace(flow.nodes[0], rows=rows)
  flow = dataclasses.replace(flow, nodes=(first, *flow.nodes[1:]))
  pieced = cut.cut(flow, pieces)
  assert len(offloading.private(pieced, ('a',))) == 1
  for names in (('b',), ()):
    assert offloading.private(pieced, names) == {}
