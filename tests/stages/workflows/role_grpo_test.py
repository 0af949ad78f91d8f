"""Two policies that play two roles, each with its own TrainState."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stages
from stages import workflows
from stages.language import (
  conversation,
  policy_stages,
  policy_update,
  verifiers,
)
from stages.learn import losses, turn_advantages
from tests.rlinf_jax.runtime.plans import invariance_test
import tiny
import toy_conversation

LENGTH, TURNS, GROUP = 12, 2, 2
NAMES = ('one', 'other')
PROBLEMS = 4


@functools.cache
def policy(**kwargs):
  """A policy, with fields of it that are replaced."""
  return tiny.policy(length=LENGTH)._replace(**kwargs)


def weighted_verifier():
  """Rewards of the environment, times a parameter."""
  episode_return = conversation.episode_return()

  @stages.stage('weigh', unbatched=(0,))
  def weigh(weight, verdict):
    return verdict._replace(reward=weight * verdict.reward)

  def verify(weight, answer, x):
    return weigh(weight, episode_return(answer, x.action, x.mask))

  return verifiers.LearnedVerifier(jax.random.uniform, verify)


@functools.cache
def apart():
  return workflows.role_grpo(
    [policy(), policy()],
    conversation.episode_return(),
    [invariance_test.KEEP] * 2,
    envs=toy_conversation.envs(roles=NAMES),
    max_turns=TURNS,
    group_size=GROUP,
    aggregate=losses.token_mean,
    eval_greedy=False,
  )


def together(learned):
  """One policy in both roles, of which one is learned."""
  converse = toy_conversation.converse(TURNS, roles=NAMES)
  return workflows.grpo(
    policy(),
    conversation.episode_return(),
    invariance_test.KEEP,
    group_size=GROUP,
    aggregate=losses.token_mean,
    rollouts=functools.partial(
      policy_stages.complete,
      converse=functools.partial(converse, learned=[learned]),
    ),
  )


LAWS = {
  'kl_and_shuffled_minibatches': {
    'kl_coef': 0.5,
    'kl_estimator': losses.kl_k2,
    'num_minibatches': 2,
    'num_epochs': 2,
    'minibatch_by': 'shuffled',
  },
  'a_stale_policy_and_a_penalty_to_go': {
    'kl_reward_coef': 0.5,
    'kl_to_go': True,
    'staleness': 1,
    'clip_low': 0.01,
    'dual_clip': 1.5,
  },
  # Log-probs are computed again, as those of an engine are.
  'importance_weights_and_a_learned_verifier': {
    'policy': {'recompute_logp': True},
    'verify': weighted_verifier(),
    'kl_coef': 0.1,
    'importance_weight': losses.sequence_weight,
    'importance_cap': 1.05,
    'likelihood': losses.sequence_logp,
    'policy_loss': losses.cispo,
    'normalize_advantages': True,
    'turn_advantage': turn_advantages.by_turn(0.5),
  },
}


@pytest.mark.parametrize('name', LAWS)
def test_with_one_role_it_is_grpo(name):
  """To the bit, in two steps: the second has moved from the reference."""
  parts = {
    'verify': conversation.episode_return(),
    'group_size': GROUP,
    **LAWS[name],
  }
  acts = policy(**parts.pop('policy', {}))
  envs = toy_conversation.envs(roles=('only',))
  roles = workflows.role_grpo(
    [acts],
    optimizers=[optax.sgd(0.1)],
    envs=envs,
    max_turns=TURNS,
    **parts,
  )
  rollouts = functools.partial(
    policy_stages.complete, converse=toy_conversation.converse(TURNS)
  )
  one = workflows.grpo(
    acts, optimizer=optax.sgd(0.1), rollouts=rollouts, **parts
  )
  state = one.init(jax.random.key(0))
  learner = policy_update.Learner(state.actor, state.reference, state.past)
  of_roles = roles.init(jax.random.key(0))._replace(learners=(learner,))
  chex.assert_trees_all_equal(of_roles.verifier, state.verifier)
  for i in range(2):
    given = tiny.problem(rows=4, seed=i), jax.random.key(i)
    state, info = one.step(state, *given)
    of_roles, named = roles.step(of_roles, *given)
    (learner,) = of_roles.learners
    learned = learner.actor, learner.past
    chex.assert_trees_all_equal(learned, (state.actor, state.past))
    numbers, named = tiny.read(info), tiny.read(named)
    assert {k: x for k, x in named.items() if k in numbers} == numbers
    assert numbers['train/kl_reference'] > 0 or i == 0
  start = one.init(jax.random.key(0)).actor.params
  assert not np.allclose(state.actor.params['norm_D'], start['norm_D'])


def problem():
  return tiny.problem(rows=2 * PROBLEMS)


@pytest.fixture(scope='module')
def stepped():
  """A state of two equal policies, that after a step, and the metrics."""
  state = apart().init(jax.random.key(0))
  state = state._replace(learners=(state.learners[0],) * 2)
  return state, *apart().step(state, problem(), jax.random.key(1))


def test_each_policy_learns_what_one_does_from_the_rows_of_its_role(stepped):
  """`KEEP` keeps the gradient as it is, so that updates are gradients."""
  state, new, _ = stepped
  before = state.learners[0].actor
  moved = [
    jax.tree.map(np.subtract, learner.actor.params, before.params)
    for learner in new.learners
  ]
  for name, own in zip(NAMES, moved, strict=True):
    grpo = together(name)
    one = grpo.init(jax.random.key(0))._replace(actor=before)
    one, _ = grpo.step(one, problem(), jax.random.key(1))
    expected = jax.tree.map(np.subtract, one.actor.params, before.params)
    assert max(np.abs(x).max() for x in jax.tree.leaves(own)) > 1e-4
    jax.tree.map(
      functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-6),
      own,
      expected,
    )
  assert not np.allclose(moved[0]['norm_D'], moved[1]['norm_D'])


def test_metrics_are_of_each_role_and_of_both(stepped):
  numbers = tiny.read(stepped[2])
  norms = [numbers[f'train/{name}/grad_norm'] for name in NAMES]
  assert norms[0] != norms[1]
  assert numbers['train/grad_norm'] == pytest.approx(np.mean(norms))
  both = [numbers[f'rollout/reward/{name}'] for name in NAMES]
  assert numbers['rollout/reward_mean'] == pytest.approx(np.mean(both))
  assert numbers['train/skipped'] == 0


def test_one_of_two_policies_may_have_metrics_that_the_other_lacks():
  workflow = workflows.role_grpo(
    [policy(recompute_logp=True), policy()],
    conversation.episode_return(),
    [invariance_test.KEEP] * 2,
    envs=toy_conversation.envs(roles=NAMES),
    max_turns=TURNS,
    group_size=GROUP,
  )
  flow = tiny.trace(workflow, problem())
  names = {node.stage.name for node in flow.nodes}
  assert 'one_logprob_gap' in names and 'other_logprob_gap' not in names


def test_the_words_of_a_role_are_of_its_own_policy():
  """Until it hears of the other, the first role does not depend on it."""
  state = apart().init(jax.random.key(0))
  weight_B = (jnp.arange(2 * PROBLEMS) % 2 == 0).astype(jnp.float32)
  given, rows = problem()._replace(weight=weight_B), []
  for other in state.learners:
    learners = state.learners[0], other
    info = apart().evaluate(
      state._replace(learners=learners), given, jax.random.key(2)
    )
    rows.append(jax.device_get(info['eval/samples'].rows))
  token, mask = (
    [x[name] for x in rows] for name in ('completion', 'completion_mask')
  )
  assert any((a != b).any() for a, b in zip(token[0], token[1], strict=True))
  for i in range(0, 2 * PROBLEMS, 2):
    n = int(np.argmin(np.append(mask[0][i], 0)))  # Tokens of its first turn.
    assert n and (token[0][i][:n] == token[1][i][:n]).all()
    np.testing.assert_array_equal(mask[0][i][:n], mask[1][i][:n])


@pytest.mark.parametrize('policies, optimizers', [(1, 1), (2, 1), (3, 3)])
def test_another_number_of_policies_than_of_roles_is_refused(
  policies, optimizers
):
  with pytest.raises(ValueError, match='for every role'):
    workflows.role_grpo(
      [policy()] * policies,
      conversation.episode_return(),
      [invariance_test.KEEP] * optimizers,
      envs=toy_conversation.envs(roles=NAMES),
      max_turns=TURNS,
      group_size=GROUP,
    )


def test_a_balance_of_experts_that_no_policy_has_is_refused():
  with pytest.raises(ValueError, match='trains no router'):
    workflows.role_grpo(
      [policy()] * 2,
      conversation.episode_return(),
      [invariance_test.KEEP] * 2,
      envs=toy_conversation.envs(roles=NAMES),
      max_turns=TURNS,
      group_size=GROUP,
      balance_coef=0.1,
    )
