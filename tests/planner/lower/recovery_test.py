"""A replacement repeats exactly the work that was lost."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from planner.ir import flow as flow_lib
from planner.ir import graph as graph_lib
from planner.ir import plan
from planner.lower import passes, program, recovery
from stages import workflows
from stages.learn import optimizers
import tiny
import toys

TWO = {
  'places': {'actor': {'devices': [0]}, 'learner': {'devices': [1]}},
  'stages': dict.fromkeys(('keys', 'repeat', 'generate', 'reward'), 'actor')
  | {'*': 'learner'},
}


@functools.cache
def lowered(lag=0, pieces=1):
  workflow = workflows.grpo(
    tiny.policy(),
    tiny.even_on_host,
    optimizers.adamw(1e-2),
    group_size=4,
    staleness=lag,
  )
  flow = tiny.trace(workflow, tiny.problem())
  chosen = plan.parse(TWO | {'pieces': pieces}, flow.stages)
  resident = program.homes(flow, chosen)
  cut, programs = passes.lower(flow, chosen)
  return cut, programs, resident


def starts_at(resident, place):
  return {start for start, places in resident.items() if place in places}


@pytest.mark.parametrize('lag', [0, 2])
def test_a_generating_place_holds_only_copies_and_a_learning_one_does_not(lag):
  flow, programs, resident = lowered(lag)
  own = starts_at(resident, 'actor')
  copies = recovery.copies(flow, programs['actor'], own)
  assert copies.keys() == own
  assert {op.place for op in copies.values()} == {'learner'}
  assert [op.value for op in copies.values()] == [
    end for start, end in flow.carry if start in own
  ]
  own = starts_at(resident, 'learner')
  assert recovery.copies(flow, programs['learner'], own) is None


def test_an_unchanged_value_is_restored_from_the_first_state():
  flow = graph_lib.Flow((), (toys.value(),), (), (), ((0, 0),))
  assert recovery.copies(flow, (), {0}) == {0: None}


def test_a_place_that_consumes_a_simulator_cannot_be_replaced():
  node = toys.chain('row').nodes[0]
  flow = graph_lib.Flow(
    (graph_lib.Node(node.stage, (0,), (1,), consumes=frozenset({0})),),
    (toys.value(),) * 2,
    (),
    (),
    ((0, 1),),
  )
  assert recovery.copies(flow, (program.Run(0),), set()) is None


class Lost(Exception):
  """The place is lost."""


def play(flow, ops, memory, received, left=recovery.EVERYTHING, until=None):
  """Interprets a program on numbers; returns what it sends, keeps and runs.

  Args:
    flow: its.
    ops: its instructions.
    memory: what the place begins with, by value.
    mail: what others send it, by value.
    left: what there is to do.
    until: instruction before which the place is lost.
  """
  memory, sent, kept, ran = dict(memory), {}, {}, []
  for at, op in enumerate(ops):
    if at == until:
      break
    match op:
      case program.Recv(v, _):
        memory[v] = received[v]
      case program.Run(i) if i not in left.skip:
        node = flow.nodes[i]
        args = tuple(memory[v] for v in node.reads)
        ran.append(i)
        for j, v in enumerate(node.writes):
          memory[v] = hash((node.name, i, j, args))
      case program.Send(v, place) if (v, place) not in left.sent:
        sent[v, place] = memory[v]
      case program.Keep(end, start):
        kept[start] = memory[end]
  return sent, kept, ran


def beginning(flow, ops, resident):
  """Numbers for what a place holds and is sent."""
  memory = {v: hash(('held', v)) for v in resident}
  received = {
    op.value: hash(('sent', op.value))
    for op in ops
    if isinstance(op, program.Recv)
  }
  return memory, received


@functools.cache
def random_case(seed):
  rng = np.random.default_rng(seed)
  like = jax.ShapeDtypeStruct((4,), jnp.float32)
  flow = flow_lib.trace(
    tiny.random_step(seed),
    [like] * rng.integers(1, 5),
    [like] * rng.integers(1, 3),
    jax.eval_shape(jax.random.key, 0),
  )
  n = rng.integers(2, 5)
  places = {f'p{i}': plan.Placement((i,)) for i in range(n)}
  where = {name: f'p{rng.integers(n)}' for name in flow.stages}
  pieces = int(rng.choice([1, 2, 4]))
  chosen = plan.Plan(places, where, pieces=pieces)
  resident = program.homes(flow, chosen)
  cut, programs = passes.lower(flow, chosen)
  return rng, cut, programs, resident


@pytest.mark.parametrize('seed', range(60))
def test_the_remaining_work_computes_all_missing_values_and_nothing_else(seed):
  """Whichever instruction a place is lost at."""
  rng, flow, programs, resident = random_case(seed)
  for place, ops in programs.items():
    memory, received = beginning(flow, ops, starts_at(resident, place))
    all_sent, kept, ran = play(flow, ops, memory, received)
    for until in {0, len(ops), *rng.integers(0, len(ops) + 1, 4)}:
      before, *_ = play(flow, ops, memory, received, until=until)
      arrived = {at: x for at, x in before.items() if at[1] != program.SINK}
      left = recovery.left(flow, ops, arrived.keys())
      sent, kept_again, again = play(flow, ops, memory, received, left)
      assert arrived | sent == all_sent and not arrived.keys() & sent.keys()
      assert kept_again == kept
      assert {*again} <= {*ran} and left.skip == {*ran} - {*again}
      for i in again:  # Each leads to something that is missing.
        less = recovery.Left(left.skip | {i}, left.sent)
        with pytest.raises(KeyError):
          play(flow, ops, memory, received, less)


def engine(pieces, also=False):
  """A program of pieces that an engine makes, and what sends them."""
  stage = toys.Stage('act', 'row')
  stage.asynchronous = True
  judge = toys.Stage('judge', 'row')
  nodes, ops = [], []
  for i in range(pieces):
    nodes.append(graph_lib.Node(stage, (0,), (10 + i,)))
    nodes.append(graph_lib.Node(judge, (10 + i,), (20 + i,)))
    ops += [program.Begin(2 * i), program.Run(2 * i), program.Run(2 * i + 1)]
    ops.append(program.Send(20 + i, 'learner'))
    if also:
      ops.append(program.Send(10 + i, 'other'))
  flow = graph_lib.Flow(tuple(nodes), (toys.value(),) * 40, (0,), (), ())
  return flow, tuple(ops)


def test_rows_that_have_arrived_are_not_generated_again():
  flow, ops = engine(3)
  left = recovery.left(flow, ops, {(20, 'learner')})
  assert left.skip == {0, 1}


def test_rows_that_arrived_at_one_of_two_places_cannot_be_generated_again():
  """One place has the rows, another waits for what is made of them."""
  flow, ops = engine(3, also=True)
  assert recovery.left(flow, ops, {(20, 'learner')}) is None
  both = {(20, 'learner'), (10, 'other')}
  assert recovery.left(flow, ops, both).skip == {0, 1}
