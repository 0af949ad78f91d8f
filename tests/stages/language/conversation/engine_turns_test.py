"""Turns that an engine outside JAX takes, against those of the policy in JAX.

The engine of these tests computes what the policy does, so that every
conversation must be the one in JAX, in any order of events.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from stages import base, workflows
from stages.language import conversation, policy_stages
from stages.language.conversation import roles, take_turns
from stages.learn import turn_advantages
from tests.stages.language.conversation import conversation_test
import tiny
import toy_conversation
import toy_engine

LENGTH, TURNS, GROUP, ROWS = 16, 3, 2, 16
ROLES = ('one', 'other')
VERSION = 7


@functools.cache
def policy():
  return tiny.policy(length=LENGTH)


@pytest.fixture(scope='module')
def params():
  return policy().init(jax.random.key(1))


def play(params, some, envs, **kwargs):
  """Conversations of eight problems, in groups of two."""
  prompts = policy_stages.repeat(GROUP)(tiny.problem(rows=ROWS // GROUP))
  key_B = jax.random.split(jax.random.key(2), ROWS)
  run = conversation.converse(
    some, 'generate', group_size=GROUP, envs=envs, max_turns=TURNS, **kwargs
  )
  actor = base.Version(params, jnp.int32(VERSION))
  if not isinstance(some, base.Policy):
    actor = (actor,) * len(some)
  return jax.device_get(run(actor, prompts, key_B))


def assert_same(got, want):
  """Log-probabilities differ by rounding: the engine reads all tokens again."""
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, atol=1e-5), got, want
  )
  np.testing.assert_array_equal(got[1].action, want[1].action)
  np.testing.assert_array_equal(got[1].mask, want[1].mask)


@pytest.mark.parametrize('greedy', [False, True])
def test_conversations_are_those_in_jax(params, greedy):
  want = play(params, policy(), toy_conversation.envs(), greedy=greedy)
  engine = toy_engine.of(policy())
  got = play(params, engine, toy_conversation.envs(), greedy=greedy)
  assert_same(got, want)
  assert got[0].answer.terms['turns'].max() >= (1 if greedy else 2)
  assert (got[1].version == VERSION).all()


@pytest.mark.parametrize('seed', [0, 1])
def test_the_order_of_turns_and_answers_changes_no_row(params, seed):
  """With slots, some turns end, and some answers come, in every round."""
  want = play(params, policy(), toy_conversation.envs())
  engine = toy_engine.of(policy(), seed)
  assert_same(play(params, engine, toy_conversation.envs(3, seed)), want)


@pytest.mark.parametrize(
  ('slots', 'rows', 'left'), [(4, 16, 12), (4, 5, 3), (4, 1, 0), (None, 16, 0)]
)
def test_a_quarter_of_the_turns_under_way_is_waited_for(slots, rows, left):
  """By hand: 4 of 16, 2 of 5, 1 of 1; without slots all."""
  open_B = np.arange(ROWS) < rows

  def resume(params, prompt, key_B, now, *, should_continue, **_):
    np.testing.assert_array_equal(now.alive, open_B)
    while should_continue(open_B):
      open_B[np.argmax(open_B)] = False
    return toy_engine.Later(now)

  turns = take_turns.turns(
    toy_engine.of(policy())._replace(resume=resume),
    'generate',
    cast=roles.SINGLE,
    role=None,
    group_size=1,
    greedy=False,
    max_unread=toy_conversation.MAX_ANSWER,
    slots=slots,
    expected_rounds=1,
  )
  now = conversation_test.now_of([''] * ROWS, open_B.copy(), [False] * ROWS)
  key_B = jax.random.split(jax.random.key(0), ROWS)
  turns(base.Version({}, 0), tiny.problem(rows=ROWS).prompt, key_B, now, ())
  assert open_B.sum() == left


@pytest.mark.parametrize('apart', [False, True])
def test_roles_take_turns_by_engines(params, apart):
  """One engine for both roles, or one of them in JAX and one by an engine."""
  envs = toy_conversation.envs(roles=ROLES)
  engine = toy_engine.of(policy())
  want = play(params, policy(), envs)
  some = (policy(), engine) if apart else engine
  assert_same(play(params, some, envs), want)
  if not apart:
    slots = toy_conversation.envs(3, 0, ROLES)
    assert_same(play(params, toy_engine.of(policy(), 1), slots), want)


def test_a_step_learns_the_same_and_tells_the_gap():
  def step(some):
    converse = toy_conversation.converse(TURNS)
    grpo = workflows.grpo(
      some,
      conversation.episode_return(),
      optax.sgd(1.0),
      group_size=GROUP,
      turn_advantage=turn_advantages.by_turn(),
      rollouts=functools.partial(policy_stages.complete, converse=converse),
    )
    state = grpo.init(jax.random.key(0))
    new, info = grpo.step(state, tiny.problem(rows=4), jax.random.key(1))
    return state, new, tiny.read(info)

  start, want, _ = step(policy())
  _, got, info = step(toy_engine.of(policy()))
  assert info['rollout/logprob_gap_max'] < 1e-5
  moved = want.actor.params['norm_D'] - start.actor.params['norm_D']
  assert jnp.abs(moved).max() > 1e-3
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, atol=1e-6),
    got.actor.params,
    want.actor.params,
  )
