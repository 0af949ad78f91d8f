"""Two policies that play two roles, each with its own TrainState."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stages import workflows
from stages.language import conversation, policy_stages
from stages.learn import losses
from tests.rlinf_jax.runtime.plans import invariance_test
import tiny
import toy_conversation

LENGTH, TURNS, GROUP = 12, 2, 2
NAMES = ('one', 'other')
PROBLEMS = 4


@functools.cache
def policy():
  return tiny.policy(length=LENGTH)


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


def problem():
  return tiny.problem(rows=2 * PROBLEMS)


@pytest.fixture(scope='module')
def stepped():
  """A state of two equal policies, that after a step, and the metrics."""
  state = apart().init(jax.random.key(0))
  state = state._replace(actors=(state.actors[0],) * 2)
  return state, *apart().step(state, problem(), jax.random.key(1))


def test_each_policy_learns_what_one_does_from_the_rows_of_its_role(stepped):
  """`KEEP` keeps the gradient as it is, so that updates are gradients."""
  state, new, _ = stepped
  moved = [
    jax.tree.map(jnp.subtract, actor.params, state.actors[0].params)
    for actor in new.actors
  ]
  for name, own in zip(NAMES, moved, strict=True):
    grpo = together(name)
    one = grpo.init(jax.random.key(0))._replace(actor=state.actors[0])
    one, _ = grpo.step(one, problem(), jax.random.key(1))
    expected = jax.tree.map(
      jnp.subtract, one.actor.params, state.actors[0].params
    )
    assert max(float(jnp.abs(x).max()) for x in jax.tree.leaves(own)) > 1e-4
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


def test_the_words_of_a_role_are_of_its_own_policy():
  """Until it hears of the other, the first role does not depend on it."""
  state = apart().init(jax.random.key(0))
  weight_B = (jnp.arange(2 * PROBLEMS) % 2 == 0).astype(jnp.float32)
  given, rows = problem()._replace(weight=weight_B), []
  for other in state.actors:
    actors = state.actors[0], other
    info = apart().evaluate(
      state._replace(actors=actors), given, jax.random.key(2)
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
