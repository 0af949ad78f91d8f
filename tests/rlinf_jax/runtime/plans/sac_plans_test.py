"""No plan changes what SAC and RLPD compute in a JAX environment.

Placing changes no bit, of the replay buffer either. Pieces, meshes and
micro-batches change rounding. Steps have loops within loops.
"""

import functools

import jax
import numpy as np
import optax
import pytest

import claims
from planner.ir import plan as plan_lib
from stages import workflows
from stages.envs import push, replay
from stages.models.control import critics, gaussian_policy
from tests.rlinf_jax.runtime.plans import random_plans_test
import tiny

STAGES = (
  'warmup keys rollout episode_stats measure obs_moments update_obs_stats '
  'replay first_info critic_minibatch critic_gradient critic_update '
  'actor_minibatch gradient apply'
).split()
KEEP = optax.chain(optax.trace(decay=0.0), optax.scale(-0.01))
STEPS = 2
# The last two run in `make test`: a mesh that splits rows, with micro-batches
# and offloads; three places with a mesh that splits parameters, in two pieces.
SEEDS = 1, 3, 8, 11
KEPT = 8, 11
PLACED = {
  'places': {
    'robot': {'devices': [0]},
    'q': {'devices': [1]},
    'pi': {'devices': [2]},
  },
  'stages': {
    **dict.fromkeys(
      ('critic_gradient', 'critic_update', 'critic_minibatch', 'first_info'),
      'q',
    ),
    **dict.fromkeys(('gradient', 'apply', 'actor_minibatch'), 'pi'),
    '*': 'robot',
  },
}


pytestmark = pytest.mark.usefixtures('in_float64')


@pytest.fixture(scope='module', autouse=True)
def prior(tmp_path_factory):
  """A file of random transitions, as offline data."""
  path = tmp_path_factory.mktemp('prior') / 'prior.npz'
  rng = np.random.default_rng(0)
  obs, after = rng.normal(size=(2, 20, 10))
  command, number = rng.uniform(-1, 1, (20, 2)), rng.random(20)
  replay.write(path, replay.Transition(obs, command, number, number, after))
  return str(path)


@functools.cache
def workflow(prior):
  """Two actor updates per step, and two critic updates per actor update."""
  return workflows.sac(
    push.push(horizon=5, terminate=True),
    functools.partial(gaussian_policy.policy, width=8),
    functools.partial(
      critics.ensemble, num_critics=3, width=8, layer_norm=True
    ),
    KEEP,
    num_envs=8,
    num_steps=2,
    capacity=40,
    batch_size=16,
    utd_ratio=1 / 4,
    actor_update_period=2,
    critic_subset=2,
    offline_data=prior,
    learning_starts=1,
  )


@functools.cache
def eager(prior):
  """State and info after each step, called with arrays."""
  workflow_ = workflow(prior)
  state, results = workflow_.init(jax.random.key(0)), []
  for i in range(STEPS):
    state, info = workflow_.step(state, (), random_plans_test.key(i))
    results.append((tiny.arrays(state), tiny.arrays(info)))
  return results


def agrees(plan, prior):
  workflow_ = workflow(prior)
  state = workflow_.init(jax.random.key(0))
  results = random_plans_test.run(plan, workflow_, state, [()] * STEPS)
  random_plans_test.compare(plan, results, eager(prior))


@pytest.mark.slow
@pytest.mark.parametrize('seed', claims.some(SEEDS, KEPT))
def test_no_plan_changes_the_mathematics(seed, prior):
  rows = {'rollout': 2, 'critic_gradient': 4, 'gradient': 2}
  plan, _ = random_plans_test.random_plan(
    seed, STAGES, rows, ('apply',), [None]
  )
  agrees(plan, prior)


@pytest.mark.slow
def test_placing_changes_no_bit(prior):
  agrees(plan_lib.parse(PLACED, STAGES), prior)


@pytest.mark.slow
def test_the_eager_steps_change_the_parameters(prior):
  """Otherwise the plans above would agree trivially."""
  first, second = eager(prior)
  name = next(x for x in first[0] if 'critic' in x and 'see_IOD' in x)
  assert (first[0][name] != second[0][name]).any()
