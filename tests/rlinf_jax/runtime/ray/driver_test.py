"""A RayRuntime computes the bits of a LocalRuntime, and names what fails."""

import functools
import json
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ray

import local_ray
from planner.ir import flow as flow_lib
from planner.ir import plan as plan_lib
from planner.lower import passes
from rlinf_jax.runtime import local, programs
from rlinf_jax.runtime.base import StageError
from rlinf_jax.runtime.ray import driver, resources
from rlinf_jax.state import state_readers
import saved
import stages
from stages import workflows
from stages.learn import optimizers
import tiny
import toys

pytestmark = pytest.mark.slow
cluster = local_ray.cluster

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


@functools.cache
def grpo(staleness=0, dtype='float32'):
  return workflows.grpo(
    tiny.policy(dtype),
    tiny.even_on_host,
    optimizers.adamw(1e-2),
    group_size=4,
    kl_coef=0.1,
    staleness=staleness,
  )


@functools.cache
def flows(staleness=0, dtype='float32'):
  """Recorded by every process."""
  workflow = grpo(staleness, dtype)
  return (
    tiny.trace(workflow, tiny.problem()),
    tiny.trace_evaluation(workflow, tiny.problem(4)),
  )


def first(state=0.0):
  """A reader of a state, for any process."""
  return state_readers.FirstState(functools.partial(jnp.full, (), state))


def initial(make):
  return make().init(jax.random.key(0))


def run(
  runtime, make, steps=3, after_load=lambda: None, before_read=lambda: None
):
  """Runs steps of the workflow that `make` returns, and reads the state."""
  first = functools.partial(initial, make)
  runtime.start(state_readers.FirstState(first))
  after_load()
  infos = [runtime.evaluate(tiny.problem(4), jax.random.key(9))]
  submitted = [
    runtime.submit(tiny.problem(seed=i), jax.random.key(i))
    for i in range(steps)
  ]
  infos += [info.result() for info in submitted]
  runtime.wait()
  before_read()
  return tiny.arrays((jax.device_get(infos), saved.state_of(runtime)))


def of_plan(sketch, fn, **kwargs):
  """A RayRuntime and a LocalRuntime of a plan."""
  step, evaluate = fn()
  plan = plan_lib.parse(sketch, dict.fromkeys(step.stages + evaluate.stages))
  return (
    driver.RayRuntime(plan, fn, step=step, evaluate=evaluate, **kwargs),
    local.LocalRuntime(plan, step=step, evaluate=evaluate),
  )


@pytest.fixture
def runtimes():
  """Makes both, of which the RayRuntime is closed after the test."""
  remotes = []

  def make(sketch, fn=flows, **kwargs):
    remote, local_ = of_plan(sketch, fn, **kwargs)
    remotes.append(remote)
    return remote, local_

  yield make
  for runtime in remotes:
    runtime.close()


@pytest.mark.claims
@pytest.mark.parametrize('places, staleness', [(2, 0), (2, 1), (3, 0), (3, 1)])
def test_processes_compute_the_same_bits(runtimes, places, staleness):
  """So does, below, a loop in three places, in an order of its own."""
  sketch = {2: TWO, 3: THREE}[places]
  remote, local_ = runtimes(sketch, functools.partial(flows, staleness))
  got, want = (
    run(remote, functools.partial(grpo, staleness)),
    run(local_, functools.partial(grpo, staleness)),
  )
  tiny.assert_same_bits(got, want)
  assert_told(remote)
  local_.close()


def assert_rounded(remote, local_, steps):
  """Checks that places of `TWO` were sent parameters in bfloat16."""
  ends = 'learner', 'actor'
  traffic = programs.traffic(local_.lowered['step'], remote.transport)
  planned = sum(size for *pair, _, size in traffic if tuple(pair) == ends)
  params = jax.eval_shape(tiny.policy().init, jax.random.key(0))
  half = sum(2 * x.size for x in jax.tree.leaves(params))
  assert half < planned < 1.2 * half
  # An evaluation of the first state is sent its parameters, too.
  assert steps * planned <= remote.moved()[ends][0] < (steps + 2) * planned


def assert_told(remote):
  """Checks what a runtime tells about the run of its processes."""
  spans = remote.timeline.take()
  assert {span.place for span in spans} == set(remote.plan.places)
  assert min(span.start for span in spans) > 0
  assert max(span.end for span in spans) < remote.timeline.now()[0]
  moved = remote.moved()
  assert moved['actor', 'learner'][0] > 0
  about = remote.processes()
  assert len({one['pid'] for one in about.values()}) == len(about)


@functools.cache
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


def test_a_loop_runs_in_three_processes_in_the_order_of_a_plan(runtimes):
  step, evaluate = dapo_flows()
  sketch = {
    'places': {p: {'devices': [i]} for i, p in enumerate('abc')},
    'stages': {'generate': 'a', 'round_prompts': 'a', 'reward': 'b', '*': 'c'},
    'pieces': 2,
  }
  plan = plan_lib.parse(sketch, dict.fromkeys(step.stages + evaluate.stages))
  known = passes.with_order(step, plan, toys.Random(0))
  facts = [
    programs.fingerprint(programs.lower(one, step, evaluate))
    for one in (plan, known)
  ]
  assert facts[0] != facts[1]  # An actor with another order is refused.
  remote, local_ = runtimes(json.loads(known.to_json()), dapo_flows)
  assert remote.plan.order == local_.plan.order == known.order
  assert remote.lowered == local_.lowered
  got, want = run(remote, dapo), run(local_, dapo)
  tiny.assert_same_bits(got, want)
  local_.close()


@stages.stage('double')
def double(x):
  return 2 * x


SLOW = 100.0  # A batch of this value takes long.


def _check(x):
  if x.max() >= SLOW:
    time.sleep(15)
  elif x.max() > 10:
    raise ValueError('more than ten')
  return x


def like(x):
  return x


check = stages.Stage(_check, 'check', host=True, out_shapes=like)
add = stages.Stage(lambda w, x: (w + x.sum(), x.sum()), 'add', 'batch')


def simple(check=check, rows=4):
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


def test_a_receive_timeout_names_the_value_and_its_sender(runtimes):
  remote, _ = runtimes(PAIR, simple, receive_timeout=6.0)
  remote.start(first())
  with pytest.raises(StageError, match=r"'a' waited 6 s .*'b'.*step 1"):
    remote.step(batch(SLOW), KEY)


def different():
  """Records other shapes in actors than in the driver."""
  is_driver = ray.get_runtime_context().get_actor_id() is None
  return simple(rows=4 if is_driver else 5)


def test_an_actor_that_records_another_flow_is_refused(runtimes):
  remote, _ = runtimes({'places': {'a': {'devices': [0]}}}, different)
  with pytest.raises(ValueError, match='another step than the driver'):
    remote.start(first())


def test_more_devices_than_ray_has_are_refused(runtimes, monkeypatch):
  monkeypatch.setattr(resources, 'READY', 1.0)
  many = {'devices': list(range(500)), 'axes': [['tensor', 500]]}
  step, evaluate = simple()
  plan = plan_lib.parse({'places': {'a': many}}, [*step.stages])
  remote = driver.RayRuntime(plan, simple, step=step, evaluate=evaluate)
  with pytest.raises(ValueError, match=r"wants 500 CPU for 'a', and Ray has"):
    remote.start(first())
