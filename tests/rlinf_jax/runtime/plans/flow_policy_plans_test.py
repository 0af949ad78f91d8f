"""No plan changes what GRPO computes with a flow-matching policy."""

import functools

import jax
import optax
import pytest

import claims
import jax_envs
from stages import workflows
from stages.envs import action_chunks, episode_stats
from stages.models.control import flow_policy
from tests.rlinf_jax.runtime.plans import random_plans_test
import tiny

STAGES = (
  'seeds reset keys rollout group_advantage measure ref_logp minibatch_ids '
  'minibatches gradient apply obs_moments update_obs_stats'
).split()
KEEP = optax.chain(optax.trace(decay=0.0), optax.scale(-0.01))
STEPS = 2
# Flow-SDE on four places, three of them meshes; Flow-Noise on two places, in
# pieces and micro-batches.
KEPT = 5, 6

pytestmark = pytest.mark.usefixtures('in_float64')


@functools.cache
def workflow(kind):
  return workflows.embodied_grpo(
    action_chunks.chunked(jax_envs.line(), 2, 0.9),
    functools.partial(
      flow_policy.policy,
      width=8,
      chunk=2,
      num_steps=3,
      exploration=flow_policy.Exploration(kind),
    ),
    KEEP,
    num_envs=16,
    group_size=2,
    episode_reward=episode_stats.episode_return,
    kl_coef=0.1,
    entropy_coef=0.01,
  )


@functools.cache
def eager(kind):
  """State and info after each step, called with arrays."""
  state, results = workflow(kind).init(jax.random.key(0)), []
  for i in range(STEPS):
    state, info = workflow(kind).step(state, (), random_plans_test.key(i))
    results.append((tiny.arrays(state), tiny.arrays(info)))
  return results


@pytest.mark.slow
@pytest.mark.parametrize('seed', claims.some(range(8), KEPT))
def test_no_plan_changes_the_mathematics(seed):
  # Any stage's piece can be cut so, on two devices.
  rows = {'rollout': 2, 'gradient': 4}
  plan, kind = random_plans_test.random_plan(
    seed, STAGES, rows, ('ref_logp', 'apply'), ['sde', 'noise']
  )
  workflow_ = workflow(kind)
  state = workflow_.init(jax.random.key(0))
  results = random_plans_test.run(plan, workflow_, state, [()] * STEPS)
  random_plans_test.compare(plan, results, eager(kind))
