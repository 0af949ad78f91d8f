"""No plan changes what an algorithm of language models computes.

Placing changes no bit. Pieces, meshes and micro-batches change rounding, also
of what is a barrier, such as whitening.
"""

import dataclasses
import functools
import itertools

import jax
import pytest

import claims
from rlinf_jax.runtime import flows
from stages import workflows
from stages.language import (
  conversation,
  partial_rollout,
  policy_stages,
  value_model,
)
from stages.learn import advantages, losses, selection, turn_advantages
from stages.models import lora
from tests.rlinf_jax.runtime.plans import invariance_test, random_plans_test
from tests.stages.language import partial_rollout_test
import tiny
import toy_conversation

pytestmark = pytest.mark.usefixtures('in_float64')


def grpo(adapters=None, packed_tokens=None, **kwargs):
  policy = tiny.policy('float64', packed_tokens=packed_tokens)
  return workflows.grpo(
    lora.wrap(policy, adapters) if adapters else policy,
    invariance_test.even,
    invariance_test.KEEP,
    group_size=4,
    **kwargs,
  )


def teacher(policy):
  """A policy with other parameters than the student's."""
  return policy._replace(init=lambda key: policy.init(jax.random.key(5)))


CONVERSE = functools.partial(
  policy_stages.complete, converse=toy_conversation.converse(3)
)
PARTIAL = functools.partial(
  partial_rollout.partial_rollouts, max_carry=1, extra_groups=3
)
WORKFLOWS = {
  'reinforce': lambda: workflows.reinforce(
    tiny.policy('float64'),
    invariance_test.even,
    invariance_test.KEEP,
    group_size=4,
  ),
  'reinforce_pp': lambda: grpo(
    advantage=advantages.no_baseline,
    normalize_advantages=True,
    kl_reward_coef=0.1,
    kl_to_go=True,
    mask_truncated=True,
    aggregate=losses.token_mean,
    num_minibatches=2,
  ),
  'remax': lambda: grpo(
    advantage=advantages.no_baseline,
    greedy_baseline=True,
    likelihood=losses.sequence_sum_logp,
    mask_truncated=True,
  ),
  'lora': lambda: grpo(
    lora.Lora(rank=3),
    normalize_advantages=True,
    kl_reward_coef=0.1,
    staleness=1,
    num_minibatches=2,
  ),
  'packed': lambda: grpo(
    packed_tokens=14,
    normalize_advantages=True,
    kl_coef=0.1,
    aggregate=losses.token_mean,
    num_minibatches=2,
  ),
  'conversation': lambda: workflows.grpo(
    tiny.policy('float64', length=10),
    conversation.episode_return(),
    invariance_test.KEEP,
    group_size=4,
    turn_advantage=turn_advantages.by_state(),
    rollouts=CONVERSE,
  ),
  'conversation_dapo': lambda: workflows.dapo(
    tiny.policy('float64', length=10),
    conversation.episode_return(),
    invariance_test.KEEP,
    group_size=4,
    max_rounds=2,
    rollouts=functools.partial(
      conversation.partial_conversations,
      converse=toy_conversation.converse(3),
      max_carry=1,
      extra_groups=8,
    ),
  ),
  # Answers come in another order in every run.
  'conversation_slots': lambda: workflows.grpo(
    tiny.policy('float64', length=10),
    conversation.episode_return(),
    invariance_test.KEEP,
    group_size=4,
    rollouts=functools.partial(
      policy_stages.complete,
      converse=toy_conversation.converse(3, slots=6, seed=0),
    ),
  ),
  # Rows of two roles take turns, with slots for a half of them.
  'conversation_roles': lambda: workflows.grpo(
    tiny.policy('float64', length=10),
    conversation.episode_return(),
    invariance_test.KEEP,
    group_size=2,
    rollouts=functools.partial(
      policy_stages.complete,
      converse=toy_conversation.converse(
        2, slots=6, seed=0, roles=('one', 'other')
      ),
    ),
  ),
  'conversation_policies': lambda: workflows.role_grpo(
    [tiny.policy('float64', length=10)] * 2,
    conversation.episode_return(),
    [invariance_test.KEEP] * 2,
    envs=toy_conversation.envs(roles=('one', 'other')),
    max_turns=2,
    group_size=4,
    kl_coef=0.1,
    staleness=1,
    num_minibatches=2,
    minibatch_by='shuffled',
  ),
  'conversation_ppo': lambda: workflows.ppo(
    tiny.policy('float64', length=10),
    conversation.episode_return(),
    value_model.own_trunk(dataclasses.replace(tiny.CONFIG, dtype='float64')),
    invariance_test.KEEP,
    invariance_test.KEEP,
    group_size=4,
    turn_discount=0.5,
    rollouts=CONVERSE,
  ),
  'sft': lambda: workflows.sft(
    tiny.policy('float64', config=tiny.EXPERTS),
    None,
    invariance_test.KEEP,
    balance_coef=0.1,
  ),
  'dpo': lambda: workflows.dpo(
    tiny.policy('float64'), invariance_test.KEEP, beta=0.5
  ),
  'expert_iteration': lambda: workflows.expert_iteration(
    tiny.policy('float64'),
    invariance_test.even,
    invariance_test.KEEP,
    group_size=4,
    keep=selection.best,
    kl_reward_coef=0.1,
    num_minibatches=2,
    staleness=1,
    importance_weight=losses.sequence_weight,
  ),
  'distillation': lambda: workflows.distillation(
    partial_rollout_test.policy('float64', length=12),
    teacher(partial_rollout_test.policy('float64', length=12)),
    invariance_test.even,
    invariance_test.KEEP,
    group_size=4,
    kl_reward_coef=0.1,
    rollouts=PARTIAL,
  ),
  # Two rounds of eight groups, each with three that are carried.
  'dapo': lambda: workflows.dapo(
    partial_rollout_test.policy('float64', length=12),
    invariance_test.even,
    invariance_test.KEEP,
    group_size=4,
    max_rounds=2,
    kl_reward_coef=0.1,
    num_minibatches=2,
    rollouts=PARTIAL,
  ),
  'dapo_kept_kv_cache': lambda: workflows.dapo(
    partial_rollout_test.policy('float64', length=12, slots=7),
    invariance_test.even,
    invariance_test.KEEP,
    group_size=4,
    max_rounds=2,
    rollouts=PARTIAL,
    keep_kv_cache=True,
  ),
}
# Prefixes of the learners of workflows with several.
LEARNERS = {'conversation_policies': ('one_', 'other_')}
workflow = functools.cache(lambda name: WORKFLOWS[name]())


def batches(name):
  if name == 'sft':
    return [tiny.examples(rows=32, seed=i) for i in range(2)]
  if name == 'dpo':
    return [tiny.pairs(rows=32, seed=i) for i in range(2)]
  if name == 'conversation_dapo':  # Two rounds of 16 groups, and 8 carried.
    return [tiny.problem(rows=32, seed=i) for i in range(2)]
  return [tiny.problem(rows=16, seed=i) for i in range(2)]


def start(name):
  """The state before the first step."""
  state = flows.first_state(workflow(name), jax.random.key(0), batches(name)[0])
  if name == 'dpo':
    # Against itself a policy has margins of zero but for rounding, whose sign
    # `train/accuracy` counts.
    other = workflow(name).init(jax.random.key(1))
    state = state._replace(reference=other.reference)
  return state


@functools.cache
def eager(name):
  """State and info after each of two steps, called with arrays."""
  state, results = start(name), []
  for i, batch in enumerate(batches(name)):
    state, info = workflow(name).step(state, batch, random_plans_test.key(i))
    results.append((tiny.arrays(state), tiny.arrays(info)))
  return results


# It cuts the batch into four pieces; `make claims` tries all plans. What these
# are made of, others have, too: `conversation_slots` and
# `conversation_policies` turns, slots and roles, `dapo_kept_kv_cache` the same
# rounds, `distillation` the same rollouts, and `lora` and `remax` all of
# `reinforce_pp` that sees other rows. PPO has a module of its own.
SEED = 11
FOR_CLAIMS = {
  'conversation',
  'conversation_dapo',
  'conversation_ppo',
  'conversation_roles',
  'dapo',
  'reinforce_pp',
}
KEPT = [(SEED, name) for name in WORKFLOWS if name not in FOR_CLAIMS]


@pytest.mark.slow
@pytest.mark.parametrize(
  'seed, name', claims.some([*itertools.product(range(12), WORKFLOWS)], KEPT)
)
def test_no_plan_changes_the_mathematics(name, seed):
  stages = tiny.trace(workflow(name), batches(name)[0]).stages
  learners = LEARNERS.get(name, ('',))
  gradients = [f'{learner}gradient' for learner in learners]
  updates = tuple(f'{learner}apply' for learner in learners)
  plan, _ = random_plans_test.random_plan(
    seed, stages, dict.fromkeys(gradients, 8), updates, [None], gradients
  )
  results = random_plans_test.run(
    plan, workflow(name), start(name), batches(name)
  )
  random_plans_test.compare(plan, results, eager(name))
