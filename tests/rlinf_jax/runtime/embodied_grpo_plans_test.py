"""No plan changes what GRPO computes in a world of JAX, step after step."""

import functools

import jax
import optax
import pytest

import claims
from stages import workflows
from stages.envs import episode_stats
from stages.models import gaussian_policy
from tests.rlinf_jax.runtime import random_plans_test
from tests.stages.workflows import embodied_grpo_test
import tiny

STAGES = (
  'seeds reset keys rollout compare measure refer shuffle minibatches gradient '
  'apply fold see widen'
).split()
KEEP = optax.chain(optax.trace(decay=0.0), optax.scale(-0.01))
STEPS = 2
# Minibatches, epochs, and whether groups that did alike are left out.
UPDATES = [(1, 1, False), (2, 1, True), (1, 2, False), (2, 2, True)]
# Between them all that random plans vary, as in `random_plans_test`.
KEPT = 0, 1, 5, 7, 9


pytestmark = pytest.mark.usefixtures('in_float64')


@functools.cache
def workflow(updates):
  n, epochs, filtered = updates
  return workflows.embodied_grpo(
    embodied_grpo_test.line(),
    functools.partial(gaussian_policy.policy, width=8),
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
  """Steps as arrays."""
  state, made = workflow(updates).init(jax.random.key(0)), []
  for i in range(STEPS):
    state, info = workflow(updates).step(state, (), random_plans_test.key(i))
    made.append((tiny.arrays(state), tiny.arrays(info)))
  return made


@pytest.mark.slow
@pytest.mark.parametrize('seed', claims.some(range(12), KEPT))
def test_no_plan_changes_the_mathematics(seed):
  # What a piece may be of any stage, on two devices and in two minibatches.
  rows = {'rollout': 2, 'gradient': 4}
  plan, updates = random_plans_test.random_plan(
    seed, STAGES, rows, ('ref_logp', 'apply'), UPDATES
  )
  ours = workflow(updates)
  state = ours.init(jax.random.key(0))
  made = random_plans_test.run(plan, ours, state, [()] * STEPS)
  random_plans_test.compare(plan, made, eager(updates))


def test_some_groups_differ_and_some_do_not_in_what_plans_are_tried_on():
  """Or the mask of groups would go untested."""
  info = eager(UPDATES[1])[0][1]
  told = {
    field: info[f"['rollout/groups_degenerate'].{field}"]
    for field in ('sum', 'count')
  }
  assert 0 < told['sum'] < told['count']
