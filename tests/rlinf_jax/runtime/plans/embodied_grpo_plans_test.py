"""No plan changes what GRPO computes in a JAX environment, by its tokens."""

import functools

import jax
import optax
import pytest

import claims
import jax_envs
from stages import workflows
from stages.envs import action_chunks, episode_stats
from stages.models.control import gaussian_policy
from tests.rlinf_jax.runtime.plans import random_plans_test
import tiny

STAGES = (
  'seeds reset keys rollout group_advantage measure ref_logp minibatch_ids '
  'minibatches gradient apply merge_info obs_moments update_obs_stats'
).split()
KEEP = optax.chain(optax.trace(decay=0.0), optax.scale(-0.01))
STEPS = 2
# Minibatches, epochs, and whether groups of equal rewards are left out.
UPDATES = [(1, 1, False), (2, 1, True), (1, 2, False), (2, 2, True)]
# The first has both meshes, four pieces and offloads; the second has three
# places, micro-batches and two minibatches, and leaves out equal groups.
KEPT = 5, 7


pytestmark = pytest.mark.usefixtures('in_float64')


@functools.cache
def workflow(updates):
  n, epochs, filtered = updates
  return workflows.embodied_grpo(
    # Episodes end in a chunk, whose other actions then do not count.
    action_chunks.chunked(jax_envs.line(), 2, 0.9),
    functools.partial(
      gaussian_policy.policy, width=8, chunk=2, logp_of='token'
    ),
    KEEP,
    num_envs=16,
    group_size=2,
    episode_reward=episode_stats.success,
    kl_coef=0.1,
    entropy_coef=0.01,
    num_minibatches=n,
    num_epochs=epochs,
    filter_groups=filtered,
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
@pytest.mark.parametrize('seed', claims.some(range(12), KEPT))
def test_no_plan_changes_the_mathematics(seed):
  # Any stage's piece can be cut so, on two devices and in two minibatches.
  rows = {'rollout': 2, 'gradient': 4}
  plan, updates = random_plans_test.random_plan(
    seed, STAGES, rows, ('ref_logp', 'apply'), UPDATES
  )
  workflow_ = workflow(updates)
  state = workflow_.init(jax.random.key(0))
  results = random_plans_test.run(plan, workflow_, state, [()] * STEPS)
  random_plans_test.compare(plan, results, eager(updates))


def test_the_eager_steps_have_groups_of_equal_and_of_different_rewards():
  """The plans above are then tested with both values of the group mask."""
  info = eager(UPDATES[1])[0][1]
  sums = {
    field: info[f"['rollout/groups_degenerate'].{field}"]
    for field in ('sum', 'count')
  }
  assert 0 < sums['sum'] < sums['count']
