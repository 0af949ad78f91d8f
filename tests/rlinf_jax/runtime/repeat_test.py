"""Loops in a step: recorded, cut, ordered, lowered, simulated and run."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from planner.ir import flow as flow_lib
from planner.ir import plan as plan_lib
from planner.lower import passes, unroll
from planner.lower import program as program_lib
from planner.simulation import simulate as simulate_lib
from rlinf_jax.runtime import base, local
import stages
from stages import repeat
from tests.planner.lower import cut_test
import tiny
import toys
from toys import Known

TOLERANCE = {'rtol': 1e-9, 'atol': 1e-9}  # In float64: sines enlarge rounding.


pytestmark = pytest.mark.usefixtures('in_float64')


@stages.stage('count', 'batch')
def count(n, most):
  """Increments a counter; whether it has reached `most`."""
  return n + 1, n + 1 >= most


@stages.stage('zero', 'batch')
def zero(like):
  return jnp.zeros_like(like)


@stages.stage('halve')
def halve(x_B):
  return x_B / 2


@stages.stage('weigh', 'sum')
def weigh(x_B):
  return x_B.sum()


@stages.stage('grow', 'batch')
def grow(x_B, sum_):
  return x_B + sum_[None]


def counted(carry, most):
  """Halves, then adds the sum, for `most` rounds."""
  n, x_B = carry
  x_B = halve(x_B)
  x_B = grow(x_B, weigh(x_B))
  n, done = count(n, most)
  return (n, x_B), done


LOOP = repeat.Repeat(counted, 'loop', at_most=5)


def step(state, inputs):
  x_B, most = inputs
  n, x_B = LOOP((zero(most), grow(x_B, state)), most)
  return weigh(halve(x_B)), n


def inputs(most=3):
  return jnp.arange(8.0), jnp.int32(most)


def trace(fn=step, state=None, given=None):
  state = jnp.ones(()) if state is None else state
  return flow_lib.trace(fn, state, inputs() if given is None else given)


# Called with arrays.


@pytest.mark.parametrize('most, rounds', [(1, 1), (3, 3), (9, 5)])
def test_called_with_arrays_a_repeat_loops_until_its_predicate(most, rounds):
  x = np.arange(8.0) + 1
  for _ in range(rounds):
    x = x / 2
    x = x + x.sum()
  result, n = step(jnp.ones(()), inputs(most))
  assert n == rounds
  np.testing.assert_allclose(result, x.sum() / 2, rtol=1e-6)


def test_without_a_predicate_a_repeat_runs_at_most_rounds():
  loop = repeat.Repeat(lambda x: (halve(x), None), 'loop', at_most=3)
  np.testing.assert_array_equal(loop(jnp.ones(2) * 8), [1, 1])


@pytest.mark.parametrize('at_most, expect', [(0, None), (2, 3), (2, 0)])
def test_impossible_numbers_of_rounds_are_refused(at_most, expect):
  with pytest.raises(ValueError, match='Loop loop runs at most .* impossible'):
    repeat.Repeat(counted, 'loop', at_most, expect)


# Recorded.


def test_a_repeat_is_recorded_as_one_call_with_a_body():
  flow = trace()
  assert [node.name for node in flow.nodes] == [
    'zero', 'grow', 'loop', 'halve', 'weigh'
  ]  # fmt: skip
  (loop,) = [node for node in flow.nodes if node.body]
  names = [node.name for node in loop.body.nodes]
  assert names == ['halve', 'weigh', 'grow', 'count']
  # A plan places the stages of the body, not the loop.
  assert flow.stages == ('zero', 'grow', 'halve', 'weigh', 'count')
  listing = str(flow)
  assert '≤ 5 rounds' in listing and '\n  halve ' in listing


def body(fn, *given):
  loop = repeat.Repeat(fn, 'loop', at_most=2)
  return lambda state, x: (state, loop(x, *given))


REFUSED = {
  'no stage': (lambda x: (x, None), 'body of loop calls no stage'),
  'no boolean': (lambda x: (halve(x[0]), x[1]), 'one boolean that a stage'),
  'two': (lambda x: (x, (count(x[1], x[1]))), 'one boolean that a stage'),
  'another carry': (lambda x: (halve(x[0]), None), 'a state like the one'),
  'twice': (
    lambda x: ((halved := halve(x[0]), halved), None),
    'returns halve. more than once, state.0 being one of them',
  ),
}


@pytest.mark.parametrize('fn, message', REFUSED.values(), ids=REFUSED)
def test_a_body_whose_output_cannot_be_its_next_input_is_refused(fn, message):
  given = jnp.ones(2), jnp.ones(2)
  if fn is REFUSED['no boolean'][0]:
    fn, given = (lambda x: ((halve(x[0]), x[1]), x[1])), given
  if fn is REFUSED['two'][0]:
    given = jnp.ones(2), jnp.int32(1)
  with pytest.raises(TypeError, match=message) as error:
    trace(body(fn), given=given)
  assert any('in stage loop, while' in note for note in error.value.__notes__)


def test_a_body_that_returns_an_input_as_its_carry_is_refused():
  loop = repeat.Repeat(lambda x, y: ((halve(x[0]), y), None), 'loop', 2)
  with pytest.raises(TypeError, match='what it was given as state.1'):
    trace(lambda s, x: (s, loop((x, x), x)), given=jnp.ones(2))


def test_a_body_that_reads_an_enclosing_value_is_refused():
  def reaching(state, x):
    loop = repeat.Repeat(lambda y: (grow(y, state), None), 'loop', 2)
    return state, loop(x)

  with pytest.raises(TypeError, match='another recording'):
    trace(reaching, given=jnp.ones(2))


@stages.stage('move', consumes=(0,))
def move(token, x):
  return token + x


def test_a_loop_carries_a_token_and_consumes_it():
  loop = repeat.Repeat(lambda t, x: (move(t, x), None), 'loop', 2)
  flow = trace(lambda t, x: (loop(t, x), ()), jnp.ones(4), jnp.ones(4))
  (node,) = flow.nodes
  assert node.consumes == {node.reads[0]}
  with pytest.raises(TypeError, match='loop has used up'):
    trace(lambda t, x: (loop(t, x), halve(t)), jnp.ones(4), jnp.ones(4))
  again = repeat.Repeat(lambda x, t: (move(t, x), None), 'loop', 2)
  with pytest.raises(TypeError, match='uses up input.0 in every round'):
    trace(lambda t, x: (t, again(x, t)), jnp.ones(4), jnp.ones(4))


# Lowered: random flows and plans, by an interpreter that models overwriting.


def random_loop(seed, depth=1):
  """A step that routes values at random, with loops nested `depth` deep."""

  def route(rng, values, depth, most):
    for _ in range(rng.integers(1, 5)):
      stage = tiny.ROUTED[rng.integers(len(tiny.ROUTED))]
      n = stage.fn.__code__.co_argcount
      new = stage(*(values[i] for i in rng.integers(len(values), size=n)))
      values += new if isinstance(new, tuple) else [new]
    if depth:
      values += loop(rng, values, depth - 1, most)
    return values

  def loop(rng, values, depth, most):
    inner, width = int(rng.integers(2**31)), int(rng.integers(1, 4))
    static = bool(rng.integers(2))

    def turn(carry, most, *given):
      n, *own = carry
      again = np.random.default_rng(inner)
      some = route(again, [*own, *given], depth, most)
      ends = [
        tiny.ROUTED[1](some[i], some[j])
        for i, j in again.integers(len(some), size=(width, 2))
      ]
      if again.integers(2):
        ends[0] = own[-1]  # The value of an earlier round.
      n, done = count(n, most)
      return (n, *ends), None if static else done

    pick = rng.integers(len(values), size=width + rng.integers(3))
    carry = zero(most), *(values[i] for i in pick[:width])
    outputs = repeat.Repeat(turn, f'loop {depth}', int(rng.integers(1, 4)))(
      carry, most, *(values[i] for i in pick[width:])
    )
    return list(outputs[1:])

  def step(state, batch, most):
    rng = np.random.default_rng(seed)
    values = route(rng, [*state, *batch], depth, most)
    values = route(rng, values, 0, most)
    pick = rng.integers(len(values), size=len(state) + rng.integers(4))
    chosen = [values[i] for i in pick]
    return chosen[: len(state)], chosen[len(state) :]

  return step


def random_rows(rng, n):
  return [jnp.asarray(rng.normal(size=4)) for _ in range(n)]


def random_case(seed):
  rng = np.random.default_rng(seed)
  state, batch = (
    random_rows(rng, rng.integers(1, 4)),
    random_rows(rng, rng.integers(1, 3)),
  )
  fn = random_loop(seed, depth=1 + seed % 2)
  flow = flow_lib.trace(fn, state, batch, jnp.int32(2))
  n = int(rng.integers(1, 4))
  plan = plan_lib.Plan(
    {f'p{i}': plan_lib.Placement((i,)) for i in range(n)},
    {name: f'p{rng.integers(n)}' for name in flow.stages},
    pieces=int(rng.choice([1, 2, 4])),
    offload=tuple(name for name in flow.stages if rng.random() < 0.2),
  )
  return fn, flow, plan, state, batch


@dataclasses.dataclass(eq=False)
class Buffer:
  """Memory, and whether a stage has overwritten it."""

  x: object
  overwritten: bool = False


@dataclasses.dataclass(eq=False)
class Frame:
  """A program that a place executes: of a flow, or of a loop's body."""

  flow: object
  program: tuple
  memory: dict
  inputs: dict
  loop: tuple = ()
  rounds: int = 1
  op: object = None
  at: int = 0
  carry: dict = dataclasses.field(default_factory=dict)
  is_last: bool = False


class ModelPlace:
  """A place that asserts what a runtime relies on."""

  def __init__(self, name, frame, channels, sink):
    self.name, self.frames = name, [frame]
    self.channels, self.sink = channels, sink

  def advance(self) -> bool:
    """Executes an instruction; False if it must wait, or has ended."""
    frame = self.frames[-1]
    if frame.at == len(frame.program):
      return self.end_round(frame)
    memory, op = frame.memory, frame.program[frame.at]
    match op:
      case program_lib.Run(i, donate):
        self.run(frame, frame.flow.nodes[i], donate)
      case program_lib.Send(v, target) if target == program_lib.SINK:
        self.sink[v] = memory[v]
      case program_lib.Send(v, target):
        assert not memory[v].overwritten
        queue = self.channels.setdefault((frame.loop, v, self.name, target), [])
        queue.append(Buffer(memory[v].x))
      case program_lib.Recv(v, source):
        assert v not in memory
        queue = self.channels.get((frame.loop, v, source, self.name), [])
        if source != program_lib.SOURCE and not queue:
          return False
        memory[v] = frame.inputs[v] if not queue else queue.pop(0)
      case program_lib.Keep(end, start):
        frame.carry[start] = memory[end]
      case program_lib.Drop(v):
        del memory[v]
      case program_lib.Until(v):
        assert not memory[v].overwritten
        frame.is_last = bool(memory[v].x)
      case program_lib.Repeat():
        self.enter(frame, op)
    frame.at += 1
    return True

  def run(self, frame, node, donate):
    buffers = [frame.memory[v] for v in node.reads]
    assert not any(buffer.overwritten for buffer in buffers)
    args = [buffer.x for buffer in buffers]
    if node.takes is not None:
      args = jax.tree.unflatten(node.takes, args)
    outputs = jax.tree.leaves(node.stage.fn(*args))
    for v in donate:
      frame.memory.pop(v).overwritten = True
    for v, x in zip(node.writes, outputs, strict=True):
      assert v not in frame.memory
      frame.memory[v] = Buffer(x)

  def enter(self, frame, op):
    node, memory = frame.flow.nodes[op.node], frame.memory
    assert not any(memory[v].overwritten for v in op.reads)
    initial = {
      start: memory[v] if v in op.donate else Buffer(memory[v].x)
      for v, start, _ in op.carry
    }
    given = {x: memory[v] for v, x in op.given}
    loop, rounds = (*frame.loop, op.node), node.stage.at_most
    for v in op.donate:
      del memory[v]
    self.frames.append(
      Frame(node.body, op.program, initial, given, loop, rounds, op)
    )

  def end_round(self, frame) -> bool:
    left = set(frame.memory)
    stays = {start for start, end in frame.flow.carry if start == end}
    assert left <= stays, 'A round drops all that is not carried unchanged.'
    frame.memory |= frame.carry
    frame.at, frame.carry, frame.rounds = 0, {}, frame.rounds - 1
    if len(self.frames) == 1:
      frame.at = len(frame.program)
      return False
    if not frame.rounds or frame.is_last:
      self.frames.pop()
      for _, start, end in frame.op.carry:
        assert not frame.memory[start].overwritten
        self.frames[-1].memory[end] = frame.memory[start]
    return True

  @property
  def ended(self):
    return len(self.frames) == 1 and self.frames[0].rounds < 1


def play(flow, programs, memories, inputs):
  channels, sink = {}, {}
  places = [
    ModelPlace(
      name, Frame(flow, instructions, memories[name], inputs), channels, sink
    )
    for name, instructions in programs.items()
  ]
  while not all(place.ended for place in places):
    moved = False
    for place in places:
      while not place.ended and (place.advance() or place.ended):
        moved = True
    assert moved, 'Deadlock.'
  assert not any(channels.values()), 'Every sent value is received.'
  return sink, {place.name: place.frames[0].memory for place in places}


@pytest.mark.parametrize('seed', range(40))
def test_lowered_programs_with_loops_compute_what_their_flow_does(seed):
  fn, flow, plan, state, batch = random_case(seed)
  resident = program_lib.homes(flow, plan)
  if seed % 2:  # In any order that a plan may give.
    plan = passes.with_order(flow, plan, toys.Random(seed))
  flow, programs = passes.lower(flow, plan, resident=resident)
  starts = [start for start, _ in flow.carry]
  memories = {
    name: {
      v: Buffer(x)
      for v, x in zip(starts, state, strict=True)
      if name in resident[v]
    }
    for name in plan.places
  }
  given = []
  with jax.disable_jit():
    for most in (2, 1, 3):
      most = jnp.int32(most)
      state, want = fn(state, batch, most)
      leaves = jax.tree.leaves((batch, most))
      lent = dict(zip(flow.inputs, map(Buffer, leaves), strict=True))
      sink, memories = play(flow, programs, memories, lent)
      for v, x in zip(starts, state, strict=True):
        for name in resident[v]:
          np.testing.assert_allclose(memories[name][v].x, x, **TOLERANCE)
      for v, x in zip(flow.outputs, want, strict=True):
        np.testing.assert_allclose(sink[v].x, x, **TOLERANCE)
      given += [*lent.values(), *sink.values()]
  assert not any(buffer.overwritten for buffer in given)


@pytest.mark.parametrize('seed', range(20))
def test_an_unrolled_flow_computes_what_static_loops_do(seed):

  rng = np.random.default_rng(seed)
  state, batch = (
    random_rows(rng, rng.integers(1, 4)),
    random_rows(rng, rng.integers(1, 3)),
  )
  fn = random_loop(seed, depth=1 + seed % 2)
  most = jnp.int32(9)  # More rounds than any loop has.
  flow = unroll.unroll(flow_lib.trace(fn, state, batch, most))
  assert not any(node.body for node in flow.nodes)
  with jax.disable_jit():
    got = cut_test.play(flow, state, (batch, most))
    want = fn(state, batch, most)
  for one, other in zip(*map(jax.tree.leaves, (got, want)), strict=True):
    np.testing.assert_allclose(one, other, **TOLERANCE)


# Simulated.


def simulate(flow, where, cost, pieces=1):
  places = {p: plan_lib.Placement((i,)) for i, p in enumerate('xy')}
  plan = plan_lib.Plan(places, where, pieces=pieces)
  flow, programs = passes.lower(flow, plan, cost)
  return simulate_lib.simulate(flow, programs, cost)


def looped(expect=None):
  loop = repeat.Repeat(counted, 'loop', at_most=5, expect=expect)

  def step(state, inputs):
    x_B, most = inputs
    _, x_B = loop((zero(most), x_B), most)
    return weigh(x_B), ()

  return trace(step)


@pytest.mark.parametrize('expect, rounds', [(None, 5), (2, 2)])
def test_a_loop_takes_as_long_as_its_rounds(expect, rounds):
  cost = Known({'halve': 1, 'weigh': 2, 'grow': 4}, transfer=0.25)
  flow = looped(expect)
  where = dict.fromkeys(flow.stages, 'x')
  assert simulate(flow, where, cost).period == pytest.approx(rounds * 7 + 2)
  # A round waits for the sum, and the next round for the grown rows.
  where |= {'weigh': 'y', 'halve': 'y'}
  period = simulate(flow, where, cost).period
  moved = 0.25 * 2 * rounds  # There and back.
  assert period == pytest.approx(rounds * 7 + 2 + moved, abs=0.51)


def test_the_pieces_of_a_body_overlap():
  cost = Known({'halve': 4, 'weigh': 4})
  flow = looped()
  where = dict.fromkeys(flow.stages, 'x') | {'weigh': 'y'}
  periods = [simulate(flow, where, cost, n).period for n in (1, 2, 4)]
  assert periods == pytest.approx([5 * 8 + 4, 5 * 6 + 4, 5 * 5 + 4])


def test_a_span_within_a_loop_names_the_loop():
  flow = looped()
  simulation = simulate(
    flow, dict.fromkeys(flow.stages, 'x'), Known({'halve': 1})
  )
  (at,) = [i for i, node in enumerate(flow.nodes) if node.body]
  body = flow.nodes[at].body
  spans = [span for span in simulation.spans if span.step == 0 and span.loop]
  assert {span.loop for span in spans} == {(at,)}
  runs = [body.nodes[span.node].name for span in spans if span.what == 'run']
  assert runs == ['halve', 'weigh', 'grow', 'count'] * 5


# Run.


def runtime_of(flow, plan, state):
  runtime = local.LocalRuntime(plan, step=flow)
  runtime.load(state)
  return runtime


@pytest.mark.parametrize('seed', range(6))
def test_random_loops_planned_are_eager(seed):
  fn, flow, plan, state, batch = random_case(seed)
  runtime = runtime_of(flow, plan, state)
  same = functools.partial(
    np.testing.assert_allclose, **TOLERANCE
  ) if plan.pieces > 1 else np.testing.assert_array_equal  # fmt: skip
  results = []
  for most in (2, 1, 3):
    most = jnp.int32(most)
    got = runtime.step(batch, most)
    state, want = fn(state, batch, most)
    jax.tree.map(same, runtime.state(), state)
    results.append((got, want))
  for got, want in results:  # Later steps have not overwritten results.
    jax.tree.map(same, got, want)
  runtime.close()


SKETCHES = {
  'one place': {},
  'one place per stage': {
    'places': {p: {'devices': [i]} for i, p in enumerate('abcde')},
    'stages': dict(
      zip(('zero', 'grow', 'halve', 'weigh', 'count'), 'abcde', strict=True)
    ),
  },
  'one shared device': {
    'places': {p: {'devices': [0]} for p in 'abcde'},
    'stages': dict(
      zip(('zero', 'grow', 'halve', 'weigh', 'count'), 'abcde', strict=True)
    ),
    'shared_devices': [*'cabed'],
  },
  'meshes': {
    'places': {
      'a': {'devices': [0, 1], 'axes': [['data', 2]]},
      'b': {'devices': [2, 3, 4, 5], 'axes': [['data', 4]]},
    },
    'stages': {'halve': 'b', '*': 'a'},
    'pieces': 2,
  },
}


@pytest.mark.parametrize('sketch', SKETCHES.values(), ids=SKETCHES)
def test_a_loop_ends_in_the_same_round_on_every_place(sketch):
  flow, state = trace(), jnp.ones(())
  runtime = runtime_of(flow, plan_lib.parse(sketch, flow.stages), state)
  for most in (3, 1, 7, 2):
    n = runtime.step(*inputs(most))
    state, want = step(state, inputs(most))
    assert n == want == min(most, 5)
    np.testing.assert_allclose(runtime.state(), state, rtol=1e-6)
    runs = [s for s in runtime.timeline.take() if s.stage == 'count']
    assert len(runs) == want
  runtime.close()


def test_an_error_in_a_loop_names_the_round():
  def twice(n):
    if n > 1:
      raise LookupError('it is away')
    return n + 1

  like = jax.ShapeDtypeStruct((), jnp.int32)
  fails = stages.Stage(
    twice, 'more', 'batch', host=True, out_shapes=lambda n: like
  )
  loop = repeat.Repeat(lambda n: (fails(n), None), 'loop', at_most=4)
  flow = trace(lambda n, x: (loop(n), ()), jnp.int32(0), ())
  runtime = runtime_of(flow, plan_lib.one_place(flow.stages), jnp.int32(0))
  with pytest.raises(base.StageError, match='step 1, round 3 of loop: it is'):
    runtime.step((), ())
  runtime.close()
