"""Places in processes of their own give what places in one process give."""

import contextlib
import functools
import os
import re
import signal
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest
import ray

import claims
from planner.ir import flow as flow_lib
from planner.ir import plan as plan_lib
from rlinf_jax.runtime import local
from rlinf_jax.runtime.base import ProcessDiedError, StageError
from rlinf_jax.runtime.ray import actor_pool, driver, resources
import stages
from stages import workflows
from stages.learn import optimizers
import tiny

pytestmark = pytest.mark.slow

TWO = {
  'places': {'actor': {'devices': [0]}, 'learner': {'devices': [1]}},
  'stages': {
    'keys': 'actor',
    'repeat': 'actor',
    'generate': 'actor',
    'reward': 'actor',
    '*': 'learner',
  },
}
THREE = {
  'places': {
    'actor': {'devices': [0]},
    'judge': {'devices': [1]},
    'learner': {'devices': [2, 3], 'axes': [['data', 2]]},
  },
  'stages': TWO['stages'] | {'reward': 'judge', 'ref_logp': 'judge'},
  'pieces': 2,
}


def grpo(staleness=0):
  return workflows.grpo(
    tiny.policy(),
    tiny.even_on_host,
    optimizers.adamw(1e-2),
    group_size=4,
    kl_coef=0.1,
    staleness=staleness,
  )


def flows(lag=0):
  """Recorded in every process anew."""
  workflow = grpo(lag)
  return (
    tiny.trace(workflow, tiny.problem()),
    tiny.trace_evaluation(workflow, tiny.problem(4)),
  )


@pytest.fixture(scope='module', autouse=True)
def here():
  before = {p.pid for p in psutil.process_iter()}
  actor_pool.connect()
  yield
  ray.shutdown()
  time.sleep(1)
  after = [p for p in psutil.process_iter() if p.pid not in before]
  assert not [p for p in after if 'ray' in p.name()], 'Ray left processes.'


def run(runtime, workflow, steps=3, begun=lambda: None):
  runtime.load(workflow.init(jax.random.key(0)))
  begun()
  told = [runtime.evaluate(tiny.problem(4), jax.random.key(9))]
  made = [
    runtime.submit(tiny.problem(seed=i), jax.random.key(i))
    for i in range(steps)
  ]
  told += [one.result() for one in made]
  runtime.wait()
  return jax.device_get(told), tiny.arrays(runtime.state())


@pytest.fixture
def far(request):
  """Makes runtimes that end with the test."""
  made = []

  def make(sketch, fn=flows, **kwargs):
    step, evaluate = fn()
    plan = plan_lib.parse(sketch, dict.fromkeys(step.stages + evaluate.stages))
    made.append(
      driver.RayRuntime(plan, fn, step=step, evaluate=evaluate, **kwargs)
    )
    return made[-1], local.LocalRuntime(plan, step=step, evaluate=evaluate)

  yield make
  for runtime in made:
    runtime.close()


@pytest.mark.parametrize(
  'places, lag',
  claims.some([(2, 0), (2, 1), (3, 0), (3, 1)], keep=[(2, 1), (3, 0)]),
)
def test_processes_compute_the_same_bits(far, places, lag):
  sketch = {2: TWO, 3: THREE}[places]
  remote, near = far(sketch, functools.partial(flows, lag))
  got, want = run(remote, grpo(lag)), run(near, grpo(lag))
  tiny.assert_same_bits(got[0], want[0])
  tiny.assert_same_bits(got[1], want[1])
  spans = remote.timeline.take()
  assert {span.place for span in spans} == set(sketch['places'])
  assert min(span.start for span in spans) > 0
  assert max(span.end for span in spans) < remote.timeline.now()[0]
  moved = remote.moved()
  assert moved['actor', 'learner'][0] > 0
  about = remote.processes()
  assert len({one['pid'] for one in about.values()}) == len(about)
  near.close()


def dapo():
  return workflows.dapo(
    tiny.policy(),
    tiny.even_on_host,
    optimizers.adamw(1e-2),
    group_size=4,
    max_rounds=2,
  )


def dapo_flows():
  workflow = dapo()
  return (
    tiny.trace(workflow, tiny.problem()),
    tiny.trace_evaluation(workflow, tiny.problem(4)),
  )


def test_a_loop_goes_round_in_three_processes_at_once(far):
  sketch = {
    'places': {p: {'devices': [i]} for i, p in enumerate('abc')},
    'stages': {'generate': 'a', 'round_prompts': 'a', 'reward': 'b', '*': 'c'},
  }
  remote, near = far(sketch, dapo_flows)
  got, want = run(remote, dapo()), run(near, dapo())
  tiny.assert_same_bits(got[0], want[0])
  tiny.assert_same_bits(got[1], want[1])
  near.close()


@stages.stage('double')
def double(x):
  return 2 * x


def _refuse(x):
  if x.max() > 10:
    raise ValueError('more than ten')
  return x


def _sleep(x):
  if x.max() > 10:
    time.sleep(15)
  return x


def like(x):
  return x


refuse = stages.Stage(_refuse, 'check', host=True, out_shapes=like)
sleep = stages.Stage(_sleep, 'check', host=True, out_shapes=like)
add = stages.Stage(lambda w, x: (w + x.sum(), x.sum()), 'add', 'batch')


def simple(check=refuse, rows=4):
  """Three stages: double, check, add."""

  def step(w, x, key):
    del key
    return add(w, check(double(x)))

  args = jnp.zeros(()), np.zeros(rows, np.float32), jax.random.key(0)
  evaluate = flow_lib.trace(lambda w, x, key: (w, double(x)), *args)
  return flow_lib.trace(step, *args), evaluate


PAIR = {
  'places': {'a': {'devices': [0]}, 'b': {'devices': [1]}},
  'stages': {'check': 'b', '*': 'a'},
}
KEY = jax.random.key(0)


def batch(x):
  return np.full(4, x, np.float32)


def test_a_failure_names_place_stage_and_step_and_a_new_state_begins_anew(far):
  remote, _ = far(PAIR, simple)
  remote.load(jnp.zeros(()))
  assert remote.step(batch(1), KEY) == 8
  for _ in range(2):
    with pytest.raises(
      StageError, match=r"Stage check on place 'b' failed in step 2.*than ten"
    ):
      remote.step(batch(9), KEY)
    with pytest.raises(StageError, match='step 2'):  # It is not forgotten.
      remote.step(batch(1), KEY)
    remote.load(jnp.ones(()), 1)
  assert remote.step(batch(2), KEY) == 16
  assert remote.state() == 17


def test_a_process_that_dies_with_the_state_is_told_in_seconds(far):
  remote, _ = far(PAIR, functools.partial(simple, sleep))
  remote.load(jnp.zeros(()))
  assert remote.step(batch(1), KEY) == 8
  made = remote.submit(batch(9), KEY)
  time.sleep(1)
  start = time.monotonic()
  os.kill(remote.processes()['a']['pid'], signal.SIGKILL)
  with pytest.raises(StageError, match="process of place 'a' has died"):
    made.result(timeout=20)
  assert time.monotonic() - start < 5
  remote.load(jnp.ones(()), 1)  # It is there again.
  assert remote.step(batch(2), KEY) == 16 and remote.state() == 17


def test_a_process_that_dies_without_a_state_is_replaced_in_seconds(far):
  remote, _ = far(PAIR, functools.partial(simple, sleep))
  remote.load(jnp.zeros(()))
  assert remote.step(batch(1), KEY) == 8
  before, made = remote.processes()['b']['pid'], remote.submit(batch(9), KEY)
  time.sleep(1)
  os.kill(before, signal.SIGKILL)
  assert made.result(timeout=60) == 72 and remote.state() == 80
  (line,) = remote.notices()
  assert "place 'b' has died in step 2 and was replaced in " in line
  assert remote.processes()['b']['pid'] != before
  assert remote.step(batch(1), KEY) == 8


def test_who_waits_too_long_says_for_what(far):
  remote, _ = far(PAIR, functools.partial(simple, sleep), receive_timeout=2.0)
  remote.load(jnp.zeros(()))
  with pytest.raises(StageError, match=r"'a' waited 2 s .*'b'.*step 1"):
    remote.step(batch(9), KEY)


def different():
  """In the driver one thing, in actors another."""
  here = ray.get_runtime_context().get_actor_id() is None
  return simple(rows=4 if here else 5)


def test_a_process_that_has_recorded_something_else_is_refused(far):
  remote, _ = far(PAIR, different)
  with pytest.raises(ValueError, match='another step than the driver'):
    remote.load(jnp.zeros(()))


def test_more_devices_than_there_are_are_refused(far, monkeypatch):
  monkeypatch.setattr(resources, 'READY', 1.0)
  many = {'devices': list(range(500)), 'axes': [['tensor', 500]]}
  step, evaluate = simple()
  plan = plan_lib.parse({'places': {'a': many}}, [*step.stages])
  remote = driver.RayRuntime(plan, simple, step=step, evaluate=evaluate)
  with pytest.raises(ValueError, match=r"wants 500 CPU for 'a', and Ray has"):
    remote.load(jnp.zeros(()))


STEPS = 6


def kill(remote, place):
  with contextlib.suppress(ProcessLookupError):
    os.kill(remote.processes()[place]['pid'], signal.SIGKILL)


def survive(remote, rng, kills):
  """Steps, a state kept after each second, and deaths at any time.

  Returns:
    What steps reported, how many deaths they were stopped by, and what was said
    of those that they were not.
  """
  saved, told, died, mended = [jnp.zeros(())], [], 0, []
  remote.load(saved[0])
  while len(told) < STEPS:
    timer = threading.Timer(
      rng.uniform(0, 0.05), kill, [remote, 'ab'[rng.integers(2)]]
    )
    try:
      if died + len(mended) < kills:
        timer.start()
      while len(told) < STEPS:
        told.append(float(remote.step(batch(len(told) % 5), KEY)))
        mended += remote.notices()
        if len(told) % 2 == 0:
          saved.append(remote.state())
    except ProcessDiedError:
      died += 1
      told = told[: 2 * (len(saved) - 1)]
      remote.load(saved[-1], len(told))
    finally:
      timer.cancel()
  return told, died, mended


@pytest.mark.parametrize('deaths', claims.some([8, 30], keep=[8]))
def test_deaths_at_any_moment_change_nothing(far, deaths):
  remote, near = far(PAIR, simple)
  near.load(jnp.zeros(()))
  want = [float(near.step(batch(i % 5), KEY)) for i in range(STEPS)]
  final, rng = float(near.state()), np.random.default_rng(0)
  died, mended = 0, 0
  while died + mended < deaths:
    told, more, lines = survive(remote, rng, 3)
    assert told == want and float(remote.state()) == final
    died, mended = died + more, mended + len(lines)
    assert all("of place 'b' has died" in line for line in lines)
  assert min(died, mended) > deaths // 6  # `a` holds the state, `b` nothing.


@pytest.mark.parametrize('lag', claims.some([0, 1], keep=[1]))
def test_who_only_holds_copies_is_taken_over_within_a_step(far, lag):
  """Whenever it dies: nothing is loaded again, and all bits are the same."""
  sketch = TWO | {'pieces': 2}
  remote, near = far(sketch, functools.partial(flows, lag))
  want = run(near, grpo(lag), steps=8)
  near.close()
  run(remote, grpo(lag))  # All is compiled.
  rng, mended = np.random.default_rng(lag), []
  for _ in range(4):
    timer = threading.Timer(rng.uniform(0, 0.4), kill, [remote, 'actor'])
    got = run(remote, grpo(lag), steps=8, begun=timer.start)
    timer.join()
    tiny.assert_same_bits(got[0], want[0])
    tiny.assert_same_bits(got[1], want[1])
    mended += remote.notices()
  assert mended
  for line in mended:
    assert re.search("'actor' has died in step .* and was replaced", line)
