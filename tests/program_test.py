import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from planner import flow, plan, program
from stages import train, workflows
import tiny


@functools.cache
def random_flow(seed):
  rng = np.random.default_rng(seed)
  like = jax.ShapeDtypeStruct((4,), jnp.float32)
  return flow.trace(
    tiny.random_step(seed),
    [like] * rng.integers(1, 5),
    [like] * rng.integers(1, 3),
    jax.eval_shape(jax.random.key, 0),
  )


@functools.cache
def grpo(kl=0.0, updates=1):
  workflow = workflows.grpo(
    tiny.policy(), tiny.even, train.adamw(1e-2), group=4, kl=kl, updates=updates
  )
  return tiny.trace(workflow, tiny.problem())


@functools.cache
def sft():
  workflow = workflows.sft(tiny.policy(), tiny.even, train.adamw(1e-2))
  return tiny.trace(workflow, tiny.examples())


@functools.cache
def evaluation():
  workflow = workflows.sft(tiny.policy(), tiny.even, train.adamw(1e-2))
  return tiny.trace_evaluation(workflow, tiny.problem())


FLOWS = {
  'grpo': grpo,
  'grpo with kl': functools.partial(grpo, kl=0.1),
  'grpo with updates': functools.partial(grpo, kl=0.1, updates=2),
  'sft': sft,
  'evaluation': evaluation,
} | {
  f'random {seed}': functools.partial(random_flow, seed) for seed in range(50)
}
each_flow = pytest.mark.parametrize('make', FLOWS.values(), ids=FLOWS)


def lower(graph, **kwargs):
  (instructions,) = program.lower(
    graph, plan.one_place(graph.stages, **kwargs)
  ).values()
  return instructions


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
  for i, node in enumerate(graph.nodes):
    args = tuple(known[v] for v in node.reads)
    known |= {v: symbol(i, j, *args) for j, v in enumerate(node.writes)}
  ends = [known[end] for _, end in graph.carry]
  return ends, [known[v] for v in graph.outputs]


def interpret(graph, instructions, memory, inputs):
  """Runs a program on buffers; refuses what a runtime could not do.

  Returns:
    What it holds at the end, and what the next step starts from.
  """
  memory = memory | dict(zip(graph.inputs, inputs, strict=True))
  kept, ran = {}, []
  for op in instructions:
    match op:
      case program.Run(i, donate):
        node = graph.nodes[i]
        buffers = [memory[v] for v in node.reads]
        assert not any(buffer.overwritten for buffer in buffers)
        args = tuple(buffer.holds for buffer in buffers)
        for v in donate:
          memory.pop(v).overwritten = True
        made = {
          v: Buffer(symbol(i, j, *args)) for j, v in enumerate(node.writes)
        }
        assert memory.keys().isdisjoint(made)
        memory |= made
        ran.append(i)
      case program.Keep(end, start):
        kept[start] = memory[end]
      case program.Drop(v):
        del memory[v]
  assert ran == list(range(len(graph.nodes)))
  return memory, {v: (memory | kept)[v] for v, _ in graph.carry}


@each_flow
def test_a_program_means_what_its_flow_means(make):
  graph = make()
  instructions = lower(graph)
  starts = [start for start, _ in graph.carry]
  state = [symbol('state', i) for i in range(len(starts))]
  memory = {v: Buffer(x) for v, x in zip(starts, state, strict=True)}
  given, wanted = [], []
  for step in range(3):
    inputs = [symbol('input', step, i) for i in range(len(graph.inputs))]
    state, outputs = meaning(graph, state, inputs)
    lent = [Buffer(x) for x in inputs]
    end, memory = interpret(graph, instructions, memory, lent)
    # What is left is what was asked for, and what stays as it was.
    stays = {start for start, end in graph.carry if start == end}
    assert end.keys() == {*stays, *graph.outputs}
    assert [memory[v].holds for v in starts] == state
    given += [*lent, *(end[v] for v in graph.outputs)]
    wanted += [*inputs, *outputs]
  # What was lent or given away is still what it was, and so is the state.
  assert [buffer.holds for buffer in given] == wanted
  assert not any(buffer.overwritten for buffer in [*given, *memory.values()])


@each_flow
def test_nothing_is_held_after_its_last_use(make):
  graph = make()
  needed = set(graph.outputs)
  needed |= {start for start, end in graph.carry if start == end}
  needs = [set(needed)]  # After each instruction, backwards.
  for op in reversed(lower(graph)):
    match op:
      case program.Run(i, _):
        needed |= set(graph.nodes[i].reads)
        needed -= set(graph.nodes[i].writes)
      case program.Keep(end, _):
        needed |= {end}
    needs.append(set(needed))
  held = {start for start, _ in graph.carry} | set(graph.inputs)
  for op in lower(graph):
    need = needs.pop()
    match op:
      case program.Run(i, donate):
        assert held == need
        held = (held | set(graph.nodes[i].writes)) - set(donate)
      case program.Keep():
        assert held == need
      case program.Drop(v):
        assert v not in need
        held -= {v}
  assert held == needs.pop()


@each_flow
def test_only_what_the_runtime_alone_holds_is_overwritten(make):
  graph = make()
  sums = {
    v for node in graph.nodes if node.stage.grain == 'sum' for v in node.writes
  }
  starts = {start for start, _ in graph.carry}
  for op in lower(graph):
    if isinstance(op, program.Run):
      assert set(op.donate) <= set(graph.nodes[op.node].reads) & (sums | starts)


def test_the_optimiser_overwrites_its_state_and_the_gradient():
  graph = sft()
  (apply,) = [node for node in graph.nodes if node.name == 'apply']
  run = next(
    op
    for op in lower(graph)
    if isinstance(op, program.Run) and graph.nodes[op.node] is apply
  )
  assert set(run.donate) == set(apply.reads)


def test_parameters_that_are_read_later_are_not_overwritten():
  graph = grpo(updates=2)
  last = {}
  for i, node in enumerate(graph.nodes):
    last |= dict.fromkeys(node.reads, i)
  donated = [
    (op.node, v) for op in lower(graph)
    if isinstance(op, program.Run) for v in op.donate
  ]  # fmt: skip
  assert donated
  assert all(last[v] == i for i, v in donated)


def test_what_stays_as_it_was_is_not_kept_again():
  graph = flow.Flow((), tuple('abc'), (), (), ((0, 0), (1, 2)), None)
  keeps = [op for op in lower(graph) if isinstance(op, program.Keep)]
  assert keeps == [program.Keep(2, 1)]


def test_a_stage_without_a_place_is_refused():
  graph = sft()
  with pytest.raises(ValueError, match=r"no place for \['apply'\].*'gradient'"):
    program.lower(graph, plan.one_place(['gradient']))


def test_several_places_are_not_supported_yet():
  places = {'a': plan.Placement((0,)), 'b': plan.Placement((1,))}
  spread = plan.Plan(places, {'gradient': 'a', 'apply': 'b'})
  with pytest.raises(ValueError, match='2 places; one is supported'):
    program.lower(sft(), spread)


@pytest.mark.parametrize('rows', [0, -4, 3, 5, 2, 64])
def test_rows_that_do_not_divide_into_whole_groups_are_refused(rows):
  with pytest.raises(
    ValueError, match='32 rows, in groups of 4.*divisor of 32'
  ):
    lower(grpo(), rows={'gradient': rows})


@pytest.mark.parametrize('rows', [4, 8, 16, 32])
def test_rows_in_whole_groups_are_accepted(rows):
  assert lower(grpo(), rows={'gradient': rows, 'generate': rows})


@pytest.mark.parametrize('stage', ['apply', 'repeat', 'minibatches'])
def test_micro_batches_of_what_cannot_be_cut_are_refused(stage):
  with pytest.raises(ValueError, match=f'rows of {stage} at once.* only JAX'):
    lower(grpo(), rows={stage: 4})


def test_micro_batches_of_a_host_stage_are_refused():
  workflow = workflows.grpo(
    tiny.policy(), tiny.even_on_host, optax.sgd(1.0), group=4
  )
  graph = tiny.trace(workflow, tiny.problem())
  with pytest.raises(ValueError, match='rows of reward at once.* only JAX'):
    lower(graph, rows={'reward': 4})


def test_lowering_needs_only_what_a_flow_is_made_of():
  stage = types.SimpleNamespace(name='learn', grain='sum', group=1, host=False)
  node = types.SimpleNamespace(
    name='learn', stage=stage, reads=(0,), writes=(1,)
  )
  graph = types.SimpleNamespace(
    stages=('learn',), nodes=[node], inputs=(), outputs=(), carry=((0, 1),)
  )
  assert lower(graph) == (
    program.Run(0, (0,)),
    program.Keep(1, 0),
    program.Drop(1),
  )
