"""Simulators at a place of their own, in another process."""

import functools
import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest

import local_ray
from planner.ir import flow as flow_lib
from planner.ir import plan as plan_lib
from rlinf_jax.envs import gymnasium
from rlinf_jax.runtime import local
from rlinf_jax.runtime.base import ProcessDiedError
from rlinf_jax.runtime.ray import driver
from rlinf_jax.state import state_readers
import saved
from stages import workflows
from stages.learn import optimizers
from stages.models.control import gaussian_policy
import tiny

pytestmark = pytest.mark.slow
cluster = local_ray.cluster

ROWS, STEPS = 4, 4
PENDULUM = {'name': 'Pendulum-v1'}
APART = {
  'places': {'robots': {'devices': [0]}, 'policy': {'devices': [1]}},
  'stages': dict.fromkeys(('reset', 'simulate', 'collect'), 'robots')
  | {'*': 'policy'},
}
SEED = np.arange(2, dtype=np.int32)


def ppo(**settings):
  env = gymnasium.env(num_envs=ROWS, num_processes=2, **settings)
  return workflows.embodied_ppo(
    env,
    functools.partial(gaussian_policy.policy, width=8),
    optimizers.adamw(1e-3),
    num_envs=ROWS,
    num_steps=4,
    num_minibatches=2,
    num_epochs=1,
    eval_env=gymnasium.env(num_envs=2, **settings | {'max_episode_steps': 5}),
  )


def flows(**settings):
  """Recorded in every process anew, each with simulators of its own."""
  workflow, key = ppo(**settings), jax.random.key(0)
  state = jax.eval_shape(workflow.init, key)
  evaluate = lambda state, *more: (state, workflow.evaluate(state, *more))
  return (
    flow_lib.trace(workflow.step, state, (), key),
    flow_lib.trace(evaluate, state, SEED, key),
  )


@pytest.fixture
def make_runtime():
  """Makes runtimes that end with the test."""
  there = []

  def make(sketch, **settings):
    record = functools.partial(flows, **settings)
    step, evaluate = record()
    plan = plan_lib.parse(sketch, dict.fromkeys(step.stages + evaluate.stages))
    there.append(driver.RayRuntime(plan, record, step=step, evaluate=evaluate))
    return there[-1]

  yield make
  for runtime in there:
    runtime.close()


def run(runtime, state, first=0, steps=STEPS):
  """Steps, and evaluations between them."""
  make = functools.partial(jax.tree.map, jnp.asarray, state)
  runtime.start(state_readers.FirstState(make), first)
  return go_on(runtime, first, steps)


def go_on(runtime, first, steps):
  infos = []
  for i in range(first, steps):
    infos.append(runtime.step((), jax.random.key(i)))
    infos.append(runtime.evaluate(SEED, jax.random.key(9)))
  return jax.device_get(infos), tiny.arrays(saved.state_of(runtime))


def begin(**settings):
  return ppo(**settings).init(jax.random.key(7))


def same(got, want):
  for one, other in zip(got, want, strict=True):
    tiny.assert_same_bits(one, other)


@pytest.fixture(scope='module')
def one():
  """A run on one place: its initial state, then its results."""
  start = begin(**PENDULUM)
  step, evaluate = flows(**PENDULUM)
  plan = plan_lib.parse({}, dict.fromkeys(step.stages + evaluate.stages))
  runtime = local.LocalRuntime(plan, step=step, evaluate=evaluate)
  yield start, run(runtime, start)
  runtime.close()


def test_simulators_in_another_process_change_no_bit(make_runtime, one):
  """Continues episodes that the driver has started."""
  start, want = one
  remote = make_runtime(APART, **PENDULUM)
  same(run(remote, start), want)
  assert not remote.notices()  # No episode was lost or restored.


def test_a_dead_process_changes_no_bit(make_runtime, one):
  """Simulators, and who has them, and who learns while they go on."""
  start, want = one
  remote = make_runtime(APART, **PENDULUM)
  infos, _ = run(remote, start, steps=1)
  kept = jax.tree.map(np.array, saved.state_of(remote))
  worker = psutil.Process(remote.processes()['robots']['pid']).children()[0]
  worker.kill()  # Between two steps.
  more_infos, _ = go_on(remote, 1, 2)
  (message,) = remote.notices()
  assert 'robots: Process' in message and 'SIGKILL and is restarted' in message
  tiny.assert_same_bits(infos + more_infos, want[0][:4])
  for place in ('policy', 'robots'):
    os.kill(remote.processes()[place]['pid'], signal.SIGKILL)
    with pytest.raises(ProcessDiedError):
      go_on(remote, 1, STEPS)
    got = run(remote, kept, 1)  # As a run does, from its last checkpoint.
    assert 'robots: Episodes restored' in remote.notices()[0]
    tiny.assert_same_bits(infos + got[0], want[0])
    tiny.assert_same_bits(got[1], want[1])


def test_a_simulator_that_dies_at_a_place_loses_its_episode(
  make_runtime, tmp_path
):
  settings = {'name': 'env_toys:toys/Fragile-v0', 'mark': tmp_path / 'mark'}
  remote = make_runtime(APART, **settings)
  infos, _ = run(remote, begin(**settings), steps=2)
  assert [float(info['env/failed']) for info in infos[::2]] == [1, 0]
  (message,) = remote.notices()
  assert 'robots: Environment' in message
  assert (
    'stepping when its process was killed by SIGKILL: its episode' in message
  )
