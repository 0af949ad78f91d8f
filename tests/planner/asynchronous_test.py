"""Asynchronous stages: an engine is given all pieces at once."""

from concurrent import futures
import json
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import in_memory
from planner.explain import overview, plan_data
from planner.ir import flow as flow_lib
from planner.ir import plan as plan_lib
from planner.lower import lifetimes, passes, program
from planner.search import exact
from planner.search.plans import space as space_lib
from planner.simulation import evaluate_plan
from rlinf_jax.report import plan_page
from rlinf_jax.runtime import base, local, timeline
import stages
import toys

BATCH = np.arange(16, dtype=np.float32).reshape(8, 2)
KEY = jax.random.key(0)
REST = ('feed', 'learn', 'apply')
APART = dict.fromkeys(REST, 'learner') | {'act': 'engine', 'feed': 'engine'}


class Engine:
  """Ends nothing before it was asked for all that it expects."""

  def __init__(self, expected=1, fails=(), waits=30.0):
    self.expected, self.fails, self.waits = expected, fails, waits
    self.calls, self.all_there = [], threading.Event()

  def ask(self, w, x):
    future = futures.Future()
    self.calls.append((future, w, x))
    if len(self.calls) == self.expected:
      self.all_there.set()
      for i, call in enumerate(self.calls):
        self.answer(i, *call)
    return future

  def answer(self, i, future, w, x):
    if i in self.fails:
      future.set_exception(LookupError('it is away'))
    elif future.set_running_or_notify_cancel():
      future.set_result(x + np.asarray(w))


def step_of(engine):
  """feed → act → learn → apply."""
  act = stages.Stage(
    lambda w, x: stages.Deferred(engine.ask(w, x), lambda y: 2 * y),
    'act',
    unbatched=(0,),
    host=True,
    out_shapes=lambda w, x: jax.ShapeDtypeStruct(x.shape, jnp.float32),
    asynchronous=True,
  )
  feed = stages.Stage(lambda x: x + 1, 'feed')
  learn = stages.Stage(lambda x: jnp.sum(x, 0), 'learn', 'sum')
  apply = stages.Stage(lambda w, g: w + g, 'apply', 'batch')

  def step(w, x, key):
    del key
    total = learn(act(w, feed(x)))
    return apply(w, total), total

  return step


def runtime_of(engine, chosen):
  flow = flow_lib.trace(
    step_of(engine),
    jnp.zeros(2),
    jnp.asarray(BATCH),
    jax.eval_shape(lambda: KEY),
  )
  plan = plan_lib.parse(chosen)
  return local.LocalRuntime(plan, step=flow), flow, plan


def together(pieces):
  return {
    'places': {'all': {'devices': [0]}},
    'stages': dict.fromkeys(('act', *REST), 'all'),
    'pieces': pieces,
  }


def apart(pieces):
  return {
    'places': {'engine': {'devices': [0]}, 'learner': {'devices': [1]}},
    'stages': APART,
    'pieces': pieces,
  }


@pytest.mark.parametrize('pieces', [1, 2, 4])
@pytest.mark.parametrize('plan', [together, apart])
def test_all_pieces_start_before_any_is_awaited(plan, pieces):
  """Or this would wait for ever: the engine answers when all have asked."""
  engine = Engine(pieces)
  runtime, *_ = runtime_of(engine, plan(pieces))
  in_memory.start(runtime, jnp.ones(2))
  total = runtime.submit(BATCH, KEY).result(timeout=60)
  want = 2 * (BATCH + 1 + 1).sum(0)
  np.testing.assert_array_equal(total, want)
  np.testing.assert_array_equal(in_memory.state(runtime), 1 + want)
  assert engine.all_there.is_set()
  runtime.close()


def test_eager_calls_wait_for_their_result():
  _, total = step_of(Engine(1))(jnp.ones(2), jnp.asarray(BATCH), KEY)
  np.testing.assert_array_equal(total, 2 * (BATCH + 2).sum(0))


def test_a_failed_call_is_reported_with_stage_place_and_piece():
  engine = Engine(4, fails=[1])
  runtime, *_ = runtime_of(engine, apart(4))
  in_memory.start(runtime, jnp.ones(2))
  message = "act on place 'engine' failed in step 1, piece 2 of 4: it is away"
  with pytest.raises(base.StageError, match=message):
    runtime.step(BATCH, KEY)
  runtime.close()


def test_pending_calls_are_canceled_when_another_place_fails():
  """Another place fails while calls are under way."""
  engine = Engine(expected=9)  # More than it will be asked.
  runtime, *_ = runtime_of(engine, apart(4))
  in_memory.start(runtime, jnp.ones(2))
  runtime.submit(BATCH, KEY)
  while len(engine.calls) < 4:
    threading.Event().wait(0.01)
  engine.answer(0, *engine.calls[0])
  runtime.fail(RuntimeError('elsewhere'))
  engine.answer(1, *engine.calls[1])  # It stops at the next instruction.
  for worker_ in runtime.interpreters.values():
    worker_.wait()
  cancelled = [future.cancelled() for future, *_ in engine.calls]
  assert cancelled == [False, False, True, True]
  runtime.close()


@pytest.mark.parametrize('pieces', [1, 2, 4])
def test_a_call_begins_when_its_last_input_is_computed(pieces):
  _, flow, chosen = runtime_of(Engine(), apart(pieces))
  ordered, programs = passes.lower(flow, chosen)
  present, started = set(), []
  starts = {start for start, _ in ordered.carry}
  for op in programs['engine']:
    match op:
      case program.Recv(v, _):
        present.add(v)
      case program.Begin(i):
        assert {*ordered.nodes[i].reads} <= present | starts
        started.append(i)
      case program.Run(i):
        node = ordered.nodes[i]
        present |= {*node.writes}
        if node.name == 'act':
          assert i in started and len(started) == pieces
  assert len(started) == pieces


def test_offloaded_values_are_restored_once_for_all_pieces():
  _, flow, chosen = runtime_of(Engine(), together(4))
  ((start, end),) = flow.carry
  ordered, programs = passes.lower(flow, chosen)
  ops = lifetimes.add_offloads(
    programs['all'], ordered, frozenset({start, end}), {}
  )
  touched = [op for op in ops if getattr(op, 'value', None) == start]
  kinds = [type(op) for op in touched if not isinstance(op, program.Drop)]
  # For all calls of `act`, and for `apply`.
  both = [program.Restore, program.Offload]
  assert kinds in (both, both + both)
  at = [
    i
    for i, op in enumerate(ops)
    if isinstance(op, program.Begin | program.Run)
    and ordered.nodes[op.node].name == 'act'
  ]
  inside = ops[at[0] : at[-1]]
  assert program.Offload(start) not in inside and len(at) == 8


def in_turn(x, key, T=3):
  """A policy acts in a simulator."""
  del key
  like = lambda token, x: (token, x)
  step = lambda token, x: stages.Deferred(
    futures.Future(), lambda result: result
  )
  simulate = stages.Stage(
    step,
    'simulate',
    consumes=(0,),
    host=True,
    out_shapes=like,
    asynchronous=True,
  )
  decide = stages.Stage(lambda x: x + 1, 'act')
  token = decide(x)
  for _ in range(T):
    token, x = simulate(token, decide(x))
  return token, x


@pytest.mark.parametrize('sketch', [
  {'pieces': 2},
  {
    'places': {'robots': {'devices': [0]}, 'policy': {'devices': [1]}},
    'stages': {'simulate': 'robots', '*': 'policy'},
    'pieces': 2,
  },
], ids=['one place', 'two'])  # fmt: skip
def test_a_policy_acts_on_one_half_while_the_other_is_simulated(sketch):
  flow = in_turn_flow()
  chosen = plan_lib.parse(sketch, flow.stages)
  ordered, programs = passes.lower(flow, chosen)
  named = [
    (type(op).__name__, ordered.nodes[op.node].piece[0])
    for op in [op for ops in programs.values() for op in ops]
    if isinstance(op, program.Begin | program.Run)
    and ordered.nodes[op.node].name == 'simulate'
  ]
  begin, run = 'Begin', 'Run'
  turns = [
    (begin, 0),
    (begin, 1),
    *2 * [(run, 0), (begin, 0), (run, 1), (begin, 1)],
  ]
  assert named == [*turns, (run, 0), (run, 1)]


def in_turn_flow():
  return flow_lib.trace(
    lambda state, x, key: ((), in_turn(x, key)),
    (),
    jnp.asarray(BATCH),
    jax.eval_shape(lambda: KEY),
  )


@pytest.mark.parametrize('pieces, seconds', [(1, 4 + 3 * 3), (2, 1 + 3 * 3)])
def test_a_place_is_free_during_an_asynchronous_call(pieces, seconds):
  """In halves, simulators wait for the first two acts on one and never again.

  Of four acts two come before the first step.
  """
  flow = in_turn_flow()
  model = toys.Synthetic({'act': 1.0, 'simulate': 3.0})
  chosen = plan_lib.parse({'pieces': pieces}, flow.stages)
  evaluation = evaluate_plan.evaluate(flow, model, chosen)
  assert evaluation.seconds == pytest.approx(seconds)
  assert evaluation.busy == {'all': pytest.approx(4), 'all: simulate': 9}
  assert 'all: simulate' in overview.chart(
    evaluation.flow, evaluation.simulation
  )
  shown = json.loads(chosen.to_json())
  shown = {'plan': shown, 'timeline': plan_data.timeline(evaluation)}
  assert plan_page._tracks(shown) == ['all', 'all: simulate']


def test_the_search_overlaps_acting_and_simulating_in_two_pieces():
  model = toys.Synthetic({'act': 1.0, 'simulate': 3.0})
  found = exact.search(in_turn_flow(), model, space_lib.Space(1, pieces=(1, 2)))
  assert found.best.pieces == 2 and found.gap == 0
  assert found.seconds == pytest.approx(10)


def test_an_asynchronous_stage_outside_the_host_is_refused():
  with pytest.raises(ValueError, match='which only a host stage can be'):
    stages.Stage(lambda x: x, 'act', asynchronous=True)


def test_outputs_of_undeclared_shapes_are_refused():
  engine = Engine(1)
  act = stages.Stage(
    lambda w, x: engine.ask(w, x),
    'act',
    unbatched=(0,),
    host=True,
    out_shapes=lambda w, x: jax.ShapeDtypeStruct((3,), jnp.float32),
    asynchronous=True,
  )
  with pytest.raises(TypeError, match='Stage act declares outputs'):
    act(np.ones(2, np.float32), BATCH)


def test_seconds_of_an_asynchronous_stage_are_those_of_its_busiest_worker():
  span = lambda place, what, stage, start, end: timeline.Span(
    1, place, what, stage, (1, 1), start, end, 0.0
  )
  spans = [
    span('all', 'run', 'act', 0, 1),
    span('all', 'run', 'simulate', 3, 4),
    span('simulators 0', 'elsewhere', 'simulate', 0, 2),
    span('simulators 1', 'elsewhere', 'simulate', 0, 3),
    span('simulators 0', 'elsewhere', 'simulate', 3, 4),
    span('simulators 1', 'elsewhere', 'simulate', 3, 3.5),
  ]
  assert timeline.stage_seconds(spans) == {'act': 1, 'simulate': 3.5}
  assert timeline.seconds(spans) == {'act': 1, 'simulate': 1}
