"""No plan changes what PPO computes in a JAX environment.

Placing changes no bit. Pieces, meshes and micro-batches change rounding, also
where a step continues episodes that another step has started.
"""

import functools

import jax
import numpy as np
import optax
import pytest

import claims
import in_memory
import jax_envs
from planner.ir import flow as flow_lib
from planner.ir import plan as plan_lib
from rlinf_jax.runtime import local
import stages
from stages import workflows
from stages.envs import action_chunks, push
from stages.envs.rollouts import rollout as rollout_lib
from stages.learn import optimizers
from stages.models.control import categorical_policy, cnn, gaussian_policy
from tests.rlinf_jax.runtime.plans import random_plans_test
import tiny

STAGES = (
  'keys rollout episode_stats compute_advantages measure whiten flatten_time '
  'minibatch_ids kl_stop minibatches gradient apply merge_info obs_moments '
  'update_obs_stats'
).split()
KEEP = optax.chain(optax.trace(decay=0.0), optax.scale(-0.01))
ROWS, STEPS = 8, 2
# Minibatches, epochs, and the KL divergence that stops updates early.
UPDATES = [(1, 1, None), (2, 1, None), (1, 2, 1e9), (2, 2, 1e-4)]
# The first only places; the second has a mesh, pieces and micro-batches, and
# updates that stop early. Learning from images has the other mesh.
KEPT = 0, 6


pytestmark = pytest.mark.usefixtures('in_float64')


@functools.cache
def workflow(updates):
  n, epochs, stop = updates
  both = optimizers.actor_critic(
    KEEP, KEEP, critic_warmup_steps=1, updates_per_step=n * epochs
  )
  return workflows.embodied_ppo(
    push.push(horizon=5, terminate=True),
    functools.partial(gaussian_policy.policy, width=8),
    KEEP if n == 1 else both,  # The actor learns from the second step on.
    num_envs=ROWS,
    num_steps=8,
    num_minibatches=n,
    num_epochs=epochs,
    target_kl=stop,
    value_clip=0.2,
    entropy_coef=0.01,
  )


@functools.cache
def eager(updates):
  """State and info after each step, called with arrays."""
  state, results = workflow(updates).init(jax.random.key(0)), []
  for i in range(STEPS):
    state, info = workflow(updates).step(state, (), random_plans_test.key(i))
    results.append((tiny.arrays(state), tiny.arrays(info)))
  return results


@pytest.mark.slow
@pytest.mark.parametrize('seed', claims.some(range(24), KEPT))
def test_no_plan_changes_the_mathematics(seed):
  # Any stage's piece can be cut so, on two devices and in two minibatches.
  rows = {'rollout': 2, 'gradient': 8}
  plan, updates = random_plans_test.random_plan(
    seed, STAGES, rows, ('apply',), UPDATES
  )
  workflow_ = workflow(updates)
  state = workflow_.init(jax.random.key(0))
  results = random_plans_test.run(plan, workflow_, state, [()] * STEPS)
  random_plans_test.compare(plan, results, eager(updates))


@functools.cache
def ppo_on_images():
  """PPO that learns from images."""
  camera_encoder = cnn.Config(
    channels=(4,), kernel_sizes=(5,), strides=(3,), features=6
  )
  return workflows.embodied_ppo(
    push.push(horizon=3, image_size=16),
    functools.partial(
      gaussian_policy.policy, width=4, camera_encoder=camera_encoder
    ),
    KEEP,
    num_envs=ROWS,
    num_steps=4,
    num_minibatches=2,
    num_epochs=1,
  )


@functools.cache
def ppo_of_choices():
  """PPO whose actions are choices."""
  return workflows.embodied_ppo(
    jax_envs.line_of_choices(),
    functools.partial(categorical_policy.policy, width=4),
    KEEP,
    num_envs=ROWS,
    num_steps=4,
    num_minibatches=2,
    num_epochs=1,
  )


@functools.cache
def ppo_of_tokens():
  """PPO with ratios of tokens and values of actions, in chunks."""
  return workflows.embodied_ppo(
    action_chunks.chunked(jax_envs.line(), 2, 0.9),
    functools.partial(
      gaussian_policy.policy,
      width=4,
      chunk=2,
      logp_of='token',
      value_of='action',
    ),
    KEEP,
    num_envs=ROWS,
    num_steps=4,
    num_minibatches=2,
    num_epochs=1,
    entropy_coef=0.01,
  )


@pytest.mark.slow
@pytest.mark.parametrize('make', [ppo_on_images, ppo_of_choices, ppo_of_tokens])
def test_no_plan_changes_what_is_learned_from_images_choices_or_tokens(make):
  workflow_, results = make(), []
  state = start = workflow_.init(jax.random.key(0))
  for i in range(STEPS):
    state, info = workflow_.step(state, (), random_plans_test.key(i))
    results.append((tiny.arrays(state), tiny.arrays(info)))
  places = {
    'actor': {'devices': [0]},
    'learner': {'devices': [1, 2], 'axes': [['data', 2]]},
  }
  stages = {
    'gradient': 'learner',
    'compute_advantages': 'learner',
    '*': 'actor',
  }
  sketch = {'places': places, 'stages': stages, 'pieces': 2}
  plan = plan_lib.parse(sketch | {'micro_batch': {'gradient': 4}}, STAGES)
  planned = random_plans_test.run(plan, workflow_, start, [()] * STEPS)
  random_plans_test.compare(plan, planned, results)


def test_the_eager_steps_stop_updating_early():
  """The plans above are then tested with both values of the carried flag."""
  stopped = eager(UPDATES[-1])[-1][1]
  (share,) = (v for k, v in stopped.items() if k == "['train/stopped'].sum")
  assert 0 < share < 4


@pytest.mark.parametrize('pieces', claims.some([1, 2, 4], keep=[4]))
def test_trajectories_are_the_same_in_pieces(pieces):
  """To the bit, except for the rounding of the policy's matrix products."""
  policy = gaussian_policy.policy(push.push(), width=8)
  act = rollout_lib.rollout(policy, push.push(), 8)
  params = policy.init(jax.random.key(0))
  env_state, obs = rollout_lib.init(
    push.push(), np.arange(ROWS, dtype=np.int32)
  )

  def step(state, params, key):
    env_state, obs = state
    env_state, obs, x, timestep = act(
      params, (), env_state, obs, stages.keys(key, obs)
    )
    return (env_state, obs), (x, timestep)

  flow = flow_lib.trace(
    step, (env_state, obs), params, random_plans_test.key(0)
  )
  plan = plan_lib.parse({'pieces': pieces}, flow.stages)
  runtime = local.LocalRuntime(plan, step=flow)
  in_memory.start(runtime, (env_state, obs))
  results = runtime.step(params, random_plans_test.key(0))
  _, want = step((env_state, obs), params, random_plans_test.key(0))
  for one, other in zip(*map(jax.tree.leaves, (results, want)), strict=True):
    np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)
  runtime.close()
