"""Episodes of two roles, each a row with its own conversation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stages import base, workflows
from stages.language import (
  advantage_stages,
  conversation,
  evaluate,
  policy_stages,
)
from stages.language.conversation import conversation_state, roles
from stages.learn import advantages, optimizers
from tests.stages.language.conversation import conversation_test
import tiny
import toy_conversation

LENGTH, TURNS, GROUP = 16, 2, 2
NAMES = ('one', 'other')
PROBLEMS = 4  # With a row for each role: 8 prompts, 16 rows.


@functools.cache
def policy():
  return tiny.policy(length=LENGTH)


def play(params, slots=None, seed=None, **kwargs):
  """Episodes of `PROBLEMS` × `GROUP`, of two roles."""
  prompts = policy_stages.repeat(GROUP)(tiny.problem(rows=2 * PROBLEMS))
  key_B = jax.random.split(jax.random.key(2), 2 * PROBLEMS * GROUP)
  run = conversation.converse(
    policy(),
    'generate',
    group_size=GROUP,
    envs=toy_conversation.envs(slots, seed, NAMES),
    max_turns=TURNS,
    **kwargs,
  )
  return jax.device_get(run(base.Version(params, jnp.int32(7)), prompts, key_B))


@pytest.fixture(scope='module')
def params():
  return policy().init(jax.random.key(1))


@pytest.fixture(scope='module')
def played(params):
  return play(params)


def partners():
  """Pairs of rows of an episode, by hand: [N, R, G] laid out in order."""
  return [(4 * n + g, 4 * n + 2 + g) for n in range(PROBLEMS) for g in range(2)]


def test_each_role_reads_what_the_environment_makes_of_the_others_turn(played):
  """The roles alternate, so that turns and answers interleave."""
  _, x = played
  several = 0
  for one, other in partners():
    (turns, said), (replies, opened) = (
      spoken(x, one),
      spoken(x, other),
    )
    assert len(said) == len(turns) - 1 and len(opened) == len(replies)
    for turn, opening in zip(turns, opened, strict=False):
      assert opening == toy_conversation.answer(turn)
    for reply, answer in zip(replies, said, strict=False):
      assert answer == toy_conversation.answer(reply)
    several += len(turns) > 1
  assert several >= 2


def spoken(x, i):
  """Turns of a row, and what was said before each but an unprompted first."""
  length = int(conversation_test.packing.lengths(x.mask)[i])
  runs, before = [], None
  for token, own in zip(x.action[i, :length], x.mask[i, :length], strict=True):
    if own != before:
      runs.append((own, []))
      before = own
    runs[-1][1].append(int(token))
  return [t for own, t in runs if own], [t for own, t in runs if not own]


def test_rewards_are_those_of_the_role(played):
  problem, x = played
  for pair in partners():
    heard = [[t for t in spoken(x, i)[0] if t[-1] == 0] for i in pair]
    own = [sum(map(toy_conversation.reward, turns)) for turns in heard]
    for i, k in zip(pair, (0, 1), strict=True):
      # An idle role that a limit of its own has ended hears no more.
      expected = own[k] + own[1 - k] / 2
      assert problem.answer.reward[i] == pytest.approx(expected)
      assert problem.answer.terms[f'{NAMES[k]}_turns'][i] == len(heard[k])
      assert problem.answer.terms['turns'][i] == sum(map(len, heard))
      for name, row in zip(NAMES, pair, strict=True):
        assert problem.answer.terms[name][i] == problem.answer.reward[row]


def test_a_limit_of_one_role_ends_the_episode_of_both(played):
  _, x = played
  truncated = [(x.truncated[i], x.truncated[j]) for i, j in partners()]
  assert all(a == b for a, b in truncated) and {1.0} <= {
    a for a, _ in truncated
  }


def test_log_probs_of_all_roles_are_those_of_scoring_their_rows(played, params):
  _, x = played
  score = jax.jit(functools.partial(policy().evaluate, group_size=GROUP))
  logp_BT = score(params, x.obs, x.action).logp
  np.testing.assert_allclose(
    np.where(x.mask > 0, logp_BT, 0), x.logp * x.mask, atol=1e-5
  )


@pytest.mark.parametrize('slots', [3, 8])
def test_slots_and_the_order_of_answers_change_no_token(played, params, slots):
  for seed in (0, 1):
    problem, x = play(params, slots, seed)
    np.testing.assert_array_equal(x.action, played[1].action)
    np.testing.assert_array_equal(x.mask, played[1].mask)
    jax.tree.map(
      functools.partial(np.testing.assert_allclose, atol=1e-6),
      problem.answer,
      played[0].answer,
    )


def test_roles_that_are_not_learned_are_masked(played, params):
  _, all_ = played
  _, x = play(params, learned=['other'])
  is_other_B = np.arange(16) // GROUP % 2 == 1
  np.testing.assert_array_equal(x.mask, all_.mask * is_other_B[:, None])
  np.testing.assert_array_equal(x.action, all_.action)
  with pytest.raises(ValueError, match="'judge'"):
    play(params, learned=['judge'])


def test_idle_rows_hear_by_hand():
  """Said and held, opened, given a late reward, over by another's limit."""
  now = conversation_test.now_of(
    ['11', '', '110', '11'], alive=[False] * 4, waits=[True] * 4
  )
  now = now._replace(
    idle=jnp.array([False, True, True, True]), turns=jnp.array([0, 0, 1, 1])
  )
  reply = conversation_test.reply_of(
    [[], [3, 4], [], []],
    reward=[0.5, 0.25, 0.125, 0.0],
    holds=[1.0, 0.0, 1.0, 0.0],
    truncated=[0.0, 0.0, 0.0, 1.0],
    state=[0, 7, 0, 0],
  )
  out = jax.jit(conversation_state.append)(now, reply)
  assert out.turns.tolist() == [1, 0, 1, 1]
  assert out.idle.tolist() == [True, False, True, False]
  assert out.waits.tolist() == [True, False, True, False]
  assert out.completions.alive.tolist() == [False, True, False, False]
  assert out.completions.mask.sum(1).tolist() == [2, 2, 3, 2]
  rewards = [[0.5, 0, 0], [0.25, 0, 0], [0.125, 0, 0], [0, 0, 0]]
  assert out.by_turn.reward.tolist() == rewards
  assert out.by_turn.state.tolist() == [[0] * 3, [7, 0, 0], [0] * 3, [0] * 3]
  assert out.truncated.tolist() == [0, 0, 0, 1]


def test_terms_of_an_episode_are_in_all_of_its_rows():
  cast = roles.cast(NAMES, 2, None)
  of_row = {'turns': jnp.arange(8.0)}
  out = roles.terms(cast, of_row, jnp.arange(8.0) * 10)
  assert out['turns'].tolist() == [2, 4, 2, 4, 10, 12, 10, 12]
  assert out['one'].tolist() == [0, 10, 0, 10, 40, 50, 40, 50]
  assert out['other'].tolist() == [20, 30, 20, 30, 60, 70, 60, 70]
  assert out['other_turns'].tolist() == [2, 3, 2, 3, 6, 7, 6, 7]


def test_advantages_compare_rows_of_one_role_of_one_problem(played):
  """Rewards of the other role may be anything."""
  _, x = played
  estimate = advantage_stages.estimator(advantages.group_relative, GROUP)
  rng = np.random.default_rng(0)
  reward_B = jnp.asarray(rng.normal(size=16), jnp.float32)
  is_other_B = np.arange(16) // GROUP % 2 == 1
  one_BT, wild_BT = (
    np.asarray(estimate(x, r_B, ()))
    for r_B in (reward_B, jnp.where(is_other_B, reward_B * 9 + 5, reward_B))
  )
  np.testing.assert_array_equal(one_BT[~is_other_B], wild_BT[~is_other_B])
  for row in range(16):
    rows = slice(row // GROUP * GROUP, row // GROUP * GROUP + GROUP)
    # A row whose role had no turn is compared with nothing.
    group = advantages.fill_rewards(reward_B[rows], x.mask[rows].max(1))
    expected = (reward_B[row] - group.mean()) / (group.std(ddof=1) + 1e-6)
    np.testing.assert_allclose(
      one_BT[row], x.mask[row] * expected, rtol=1e-5, atol=1e-6
    )


def test_a_step_logs_each_role_and_evaluations_count_the_first():
  converse = toy_conversation.converse(TURNS, roles=NAMES)
  grpo = workflows.grpo(
    policy(),
    conversation.episode_return(),
    optimizers.adamw(1e-3),
    group_size=GROUP,
    rollouts=functools.partial(policy_stages.complete, converse=converse),
    evaluator=functools.partial(evaluate.evaluate, converse=converse),
  )
  state = grpo.init(jax.random.key(0))
  problem = tiny.problem(rows=2 * PROBLEMS)
  new, info = grpo.step(state, problem, jax.random.key(1))
  numbers = tiny.read(info)
  mean = (numbers['rollout/reward/one'] + numbers['rollout/reward/other']) / 2
  assert numbers['rollout/reward_mean'] == pytest.approx(mean)
  assert float(jnp.abs(new.actor.params['norm_D'] - 1.0).max()) > 0
  weight_B = (jnp.arange(2 * PROBLEMS) % 2 == 0).astype(jnp.float32)
  scores = tiny.read(
    grpo.evaluate(new, problem._replace(weight=weight_B), jax.random.key(1))
  )
  assert scores['eval/reward'] == pytest.approx(scores['eval/reward/one'])
