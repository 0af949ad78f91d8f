"""Processes share a device one at a time, and survive the holder's death."""

import functools
import itertools
import os
import signal
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import claims
import local_ray
from planner.ir import flow as flow_lib
from planner.ir import plan as plan_lib
from rlinf_jax.runtime import local
from rlinf_jax.runtime.base import ProcessDiedError
from rlinf_jax.runtime.ray import actor, driver, resources
from rlinf_jax.state import state_readers
import saved
import stages
from tests.rlinf_jax.planning import searches_test
import tiny

pytestmark = pytest.mark.slow
cluster = local_ray.cluster

SKETCH = {
  'places': {'actor': {'devices': [0]}, 'learner': {'devices': [0]}},
  'stages': {'act': 'actor', '*': 'learner'},
  'shared_devices': ['learner', 'actor'],
}
KEY, N, LONG = jax.random.key(0), 64, 0.1
SLOW = 2.0  # A batch of this value makes the slow stage very slow.


def _taking(slow, fn, *args):
  time.sleep(20 if slow and args[-1].max() >= SLOW else LONG)
  return fn(*args)


def _act(w, x):
  return x + np.asarray(w)[:1]


def _judge(x):
  return x * 0.5


def flows(slow=''):
  """act → judge → learn; the first two are host stages of some duration."""
  act = stages.Stage(
    functools.partial(_taking, slow == 'actor', _act),
    'act',
    host=True,
    unbatched=(0,),
    out_shapes=lambda w, x: x,
  )
  judge = stages.Stage(
    functools.partial(_taking, slow == 'learner', _judge),
    'judge',
    host=True,
    out_shapes=lambda x: x,
  )
  learn = stages.Stage(
    lambda w, m, x: (w + 0.1 * (x.T @ x), 0.9 * m + x.T @ x, x.sum()),
    'learn',
    'batch',
  )

  def step(state, x, key):
    del key
    w, m = state
    w, m, info = learn(w, m, judge(act(w, x)))
    return (w, m), info

  args = state(), batch(1.0), KEY
  evaluate = flow_lib.trace(lambda s, x, key: (s, act(s[0], x)), *args)
  return flow_lib.trace(step, *args), evaluate


def state():
  return jnp.eye(N), jnp.zeros((N, N))


FIRST = state_readers.FirstState(state)


def batch(x):
  return np.full((8, N), x / N, np.float32) + np.float32(x >= SLOW) * 2


@pytest.fixture
def make_runtime():
  remotes = []

  def make(slow=''):
    fn = functools.partial(flows, slow)
    step, evaluate = fn()
    plan = plan_lib.parse(SKETCH, dict.fromkeys(step.stages + evaluate.stages))
    remotes.append(driver.RayRuntime(plan, fn, step=step, evaluate=evaluate))
    return remotes[-1], local.LocalRuntime(plan, step=step, evaluate=evaluate)

  yield make
  for runtime in remotes:
    runtime.close()


def test_processes_hold_a_shared_device_in_turn_and_compute_the_same(
  make_runtime,
):
  results, runtimes = [], make_runtime()
  for runtime in runtimes:
    runtime.start(FIRST)
    infos = [runtime.evaluate(batch(0.5), KEY)]
    futures = [runtime.submit(batch(0.1 * i), KEY) for i in range(4)]
    infos += [one.result() for one in futures]
    runtime.wait()
    results.append(jax.device_get([infos, saved.state_of(runtime)]))
  jax.tree.map(np.testing.assert_array_equal, *results)
  remote, local_ = runtimes
  about = remote.processes()
  assert about['actor']['pid'] != about['learner']['pid']
  spans = [
    (s.start, s.end, s.place)
    for s in remote.timeline.take()
    if s.what in ('run', 'restore', 'offload')
  ]
  pairs = list(itertools.pairwise(sorted(spans)))
  assert len(pairs) > 10
  # Clocks of processes agree to some milliseconds; a stage takes a hundred.
  late = max(a[1] - b[0] for a, b in pairs)
  assert late < LONG / 10
  assert sum(a[2] != b[2] for a, b in pairs) == 7  # Changes of the holder.
  local_.close()


@pytest.mark.parametrize(
  'victim',
  # It holds no state, and yet its death ends the run: it holds the device.
  claims.some(['actor', 'learner'], keep=['actor']),
)
def test_the_holders_death_is_reported_and_another_gets_the_device(
  make_runtime, victim
):
  remote, local_ = make_runtime(victim)
  local_.close()
  remote.start(FIRST)
  want = float(remote.step(batch(1.0), KEY))
  future = remote.submit(batch(SLOW), KEY)
  time.sleep(1)  # It holds the device, for long.
  pid = remote.processes()[victim]['pid']
  start = time.monotonic()
  os.kill(pid, signal.SIGKILL)
  with pytest.raises(
    ProcessDiedError, match=f"process of place '{victim}' has died"
  ):
    future.result(timeout=60)
  assert time.monotonic() - start < 15  # Before the slow stage ends.
  start = time.monotonic()
  remote.start(FIRST)
  assert float(remote.step(batch(1.0), KEY)) == want
  assert remote.processes()[victim]['pid'] != pid


def second_mesh_flows():
  """GRPO of a tiny model, as `searches_test` plans it."""
  return searches_test.step(), searches_test.evaluation()


def second_mesh_state():
  return searches_test.workflow().init(KEY)


def test_processes_take_turns_with_a_second_mesh_that_a_search_found():
  plan = searches_test.searched(searches_test.model()).plan
  assert plan.shared_devices == ('all', 'generation')
  assert len({place.axes for place in plan.places.values()}) == 2
  step, evaluate = second_mesh_flows()
  first = state_readers.FirstState(second_mesh_state)
  runtimes = (
    driver.RayRuntime(plan, second_mesh_flows, step=step, evaluate=evaluate),
    local.LocalRuntime(plan, step=step, evaluate=evaluate),
  )
  results = []
  for runtime in runtimes:
    runtime.start(first)
    infos = [
      runtime.step(tiny.problem(seed=i), jax.random.key(i)) for i in range(2)
    ]
    results.append(tiny.arrays((infos, saved.state_of(runtime))))
    if runtime is runtimes[0]:
      about = runtime.processes()
      assert about['all']['pid'] != about['generation']['pid']
    runtime.close()
  tiny.assert_same_bits(*results)


def test_devices_that_ray_cannot_share_are_refused():
  places = {name: plan_lib.Placement((0,)) for name in 'ab'}
  one = plan_lib.Plan(places, {}, shared_devices=('a', 'b'))
  a, b = (actor.Process(name, 0, 1) for name in 'ab')
  assert resources.need(one, a, (a, b), 'GPU') == {'CPU': 1.0, 'GPU': 0.5}
  assert resources.need(one, a, (a, b), 'CPU') == {'CPU': 1.0}
  pair = plan_lib.Placement((0, 1), (('data', 2),))
  both = plan_lib.Plan({'a': pair, 'b': pair}, {}, shared_devices=('a', 'b'))
  for plan, kind in ((one, 'TPU'), (both, 'GPU')):
    with pytest.raises(ValueError, match='share . .PU: processes can share'):
      resources.need(plan, a, (a, b), kind)
