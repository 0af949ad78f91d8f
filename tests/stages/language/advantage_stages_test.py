"""Advantages of completions: laws, hand-worked numbers and NumPy oracles."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from stages import base, workflows
from stages.language import advantage_stages, partial_rollout, verifiers
from stages.learn import advantages, losses, objectives, turn_advantages
import tiny

pytestmark = pytest.mark.usefixtures('in_float64')
EXACT = {'rtol': 1e-12, 'atol': 1e-12}  # Another order of some float64 sums.
GROUP = 4


def batch(seed, rows=8, tokens=6):
  """Experience of random lengths, its rewards and reference log-probs.

  Padding holds numbers that would be seen in the results.
  """
  rng = np.random.default_rng(seed)
  length_B = rng.integers(1, tokens + 1, rows)
  length_B[rows // 2] = 0  # A row of padding.
  mask_BT = (np.arange(tokens)[None] < length_B[:, None]).astype(float)
  logp_BT, ref_logp_BT = rng.normal(-2.0, 1.0, (2, rows, tokens))
  logp_BT = np.where(mask_BT > 0, logp_BT, np.nan)
  x = base.Experience(
    (), np.zeros((rows, tokens), int), logp_BT, mask_BT, np.zeros(rows)
  )
  return x, rng.normal(size=rows), ref_logp_BT


def others(x, b, reward_B):
  """Rewards of the rows with a token in the group of row `b`."""
  first = b // GROUP * GROUP
  group = range(first, first + GROUP)
  return [reward_B[i] for i in group if x.mask[i].any()]


def real_tokens(x):
  return [(b, t) for b, t in np.argwhere(x.mask > 0)]


def whitened(advantage_BT, mask_BT):
  """The biased standard score of real tokens, all together."""
  real = advantage_BT[mask_BT > 0]
  mean = sum(real) / len(real)
  variance = sum((a - mean) ** 2 for a in real) / len(real)
  return np.where(
    mask_BT > 0, (advantage_BT - mean) / np.sqrt(variance + 1e-8), 0.0
  )


@pytest.mark.parametrize('seed', range(5))
def test_reinforce_pp_is_a_whitened_sum_of_later_token_rewards(seed):
  x, reward_B, ref_logp_BT = batch(seed)
  # The reward is on the last real token; each token pays β k1.
  token_reward_BT = np.zeros(x.mask.shape)
  for b, t in real_tokens(x):
    token_reward_BT[b, t] -= 0.3 * (x.logp[b, t] - ref_logp_BT[b, t])
    if t == x.mask[b].sum() - 1:
      token_reward_BT[b, t] += reward_B[b]
  want = np.zeros(x.mask.shape)
  for b, t in real_tokens(x):
    want[b, t] = token_reward_BT[b, t:].sum()
  estimate = advantage_stages.estimator(
    advantages.no_baseline, 1, kl_coef=0.3, kl_to_go=True, normalize=True
  )
  got = estimate(x, reward_B, ref_logp_BT)
  np.testing.assert_allclose(got, whitened(want, x.mask), **EXACT)


@pytest.mark.parametrize('seed', range(5))
def test_reinforce_pp_with_a_baseline_is_a_whitened_difference(seed):
  x, reward_B, _ = batch(seed)
  want = np.zeros(x.mask.shape)
  for b, t in real_tokens(x):
    want[b, t] = reward_B[b] - np.mean(others(x, b, reward_B))
  estimate = advantage_stages.estimator(
    advantages.group_centered, GROUP, normalize=True
  )
  got = estimate(x, reward_B, ())
  np.testing.assert_allclose(got, whitened(want, x.mask), **EXACT)


@pytest.mark.parametrize('seed', range(5))
def test_rloo_pays_for_the_kl_of_a_completion_before_it_compares(seed):
  x, reward_B, ref_logp_BT = batch(seed)
  paid_B = reward_B.copy()
  for b, t in real_tokens(x):
    paid_B[b] -= 0.05 * (x.logp[b, t] - ref_logp_BT[b, t])
  want = np.zeros(x.mask.shape)
  for b, t in real_tokens(x):
    group = others(x, b, paid_B)
    # The row without a token, if there is one, has their mean.
    group += [np.mean(group)] * (GROUP - len(group))
    want[b, t] = paid_B[b] - (sum(group) - paid_B[b]) / (GROUP - 1)
  estimate = advantage_stages.estimator(
    advantages.leave_one_out, GROUP, kl_coef=0.05
  )
  np.testing.assert_allclose(estimate(x, reward_B, ref_logp_BT), want, **EXACT)


def test_whitening_and_the_loss_leave_out_the_same_completions():
  x, reward_B, _ = batch(1)
  x = x._replace(truncated=(np.arange(8) % 3 == 0).astype(float))
  assert (x.mask[x.truncated > 0].sum(1) > 0).any()
  estimate = advantage_stages.estimator(
    advantages.no_baseline, 1, normalize=True, mask_truncated=True
  )
  got = estimate(x, reward_B, ())
  learned_BT = np.where(x.truncated[:, None] > 0, 0.0, x.mask)
  want = whitened(np.broadcast_to(reward_B[:, None], x.mask.shape), learned_BT)
  np.testing.assert_allclose(got, want, **EXACT)


def test_the_trainers_own_log_probs_pay_where_an_engine_sampled():
  x, reward_B, ref_logp_BT = batch(0)
  estimate = advantage_stages.estimator(
    advantages.no_baseline, 1, kl_coef=1.0, kl_to_go=True
  )
  want = estimate(x, reward_B, ref_logp_BT)
  engine = x._replace(logp=x.logp - 1.0, proximal=x.logp)
  np.testing.assert_array_equal(estimate(engine, reward_B, ref_logp_BT), want)


def test_reinforce_pp_by_hand():
  mask_BT = jnp.array([[1.0, 1.0, 0.0]])
  x = base.Experience(
    (), mask_BT, jnp.log(jnp.array([[0.5, 0.25, 1.0]])), mask_BT, ()
  )
  ref_logp_BT = jnp.log(jnp.array([[0.25, 0.5, 0.5]]))
  estimate = advantage_stages.estimator(
    advantages.no_baseline, 1, kl_coef=1.0, kl_to_go=True
  )
  # k1 is log 2 and −log 2: together they cost nothing.
  want = [[3.0, 3.0 + np.log(2), 0.0]]
  np.testing.assert_allclose(
    estimate(x, jnp.array([3.0]), ref_logp_BT), want, **EXACT
  )


def test_reward_to_go_is_the_sum_from_each_token_on():
  got = advantages.reward_to_go(jnp.array([1.0, 2.0, 4.0]))
  np.testing.assert_array_equal(got, [7.0, 6.0, 4.0])


def test_no_baseline_is_the_reward():
  reward_G = jnp.array([1.0])
  np.testing.assert_array_equal(advantages.no_baseline(reward_G), reward_G)


# Rows without a token: their environment failed, or their role had no turn.


def test_a_row_without_a_token_moves_no_baseline():
  mask_BT = np.ones((8, 2)) * (np.arange(8) % GROUP < 3)[:, None]
  x = base.Experience((), mask_BT, 0 * mask_BT, mask_BT, ())
  reward_B = np.float64([1, 1, 1, 0, 0, 1, 2, np.nan])
  for advantage in (
    advantages.group_relative,
    advantages.group_centered,
    advantages.leave_one_out,
  ):
    estimate = advantage_stages.estimator(advantage, GROUP)
    got = np.asarray(estimate(x, reward_B, ()))
    np.testing.assert_array_equal(got[:4], 0.0)
    np.testing.assert_allclose(got[4:], -got[[6, 5, 4, 7]], **EXACT)
    assert got[4, 0] < 0 < got[6, 0] and got[5, 0] == 0


@pytest.mark.parametrize(
  'turn_advantage', [turn_advantages.by_turn(), turn_advantages.by_state()]
)
def test_nor_does_it_move_that_of_a_turn(turn_advantage):
  row = np.float64([1, 0, 1, 1])  # Two turns, parted by the environment.
  mask_BT = np.stack([row, row, row, 0 * row])
  x = base.Experience((), mask_BT, 0 * mask_BT, mask_BT, ())
  reward_BK = np.float64([[0, 1], [0, 1], [0, 1], [0, 0]])
  turns = base.Turns(reward_BK, np.int32([[0, 1]] * 3 + [[0, 0]]))
  estimate = advantage_stages.estimator(
    advantages.group_relative, GROUP, turn_advantage=turn_advantage
  )
  got = estimate(x, reward_BK.sum(1), (), turns)
  np.testing.assert_array_equal(got, 0.0)
  # Of unequal rows, those with tokens are compared among themselves.
  better = turns._replace(reward=np.float64([[0, 1], [0, 0], [0, 0.5], [0, 0]]))
  got = estimate(x, better.reward.sum(1), (), better)
  np.testing.assert_allclose(got[2], 0.0, **EXACT)
  np.testing.assert_allclose(got[0], -got[1], **EXACT)
  assert got[0].max() > 0


def test_rewards_without_any_that_is_kept_are_zero():
  nan_G = jnp.full(3, jnp.nan)
  np.testing.assert_array_equal(advantages.fill_rewards(nan_G, 0 * nan_G), 0)


# ReMax.


@tiny.stages.stage('reward')
def sum_of_tokens(answer, action, mask):
  reward = ((action + answer[:, None]) * mask).sum(1)
  return base.Verdict(reward, reward)


def test_remax_subtracts_the_reward_of_the_greedy_completion():
  policy = tiny.policy()
  above_greedy = advantage_stages.above_greedy(policy, sum_of_tokens, 2)
  params = policy.init(jax.random.key(0))
  problem, key = tiny.problem(rows=4), jax.random.key(1)
  reward_B = jnp.arange(8.0)
  verdict = base.Verdict(reward_B, reward_B)
  got = above_greedy(verdict, base.Version(params, jnp.int32(0)), problem, key)
  keys = jax.random.split(key, 4)  # Others: greedy decoding draws nothing.
  x = policy.act(params, problem.prompt, keys, greedy=True)
  greedy_N = ((x.action + problem.answer[:, None]) * x.mask).sum(1)
  want = [reward_B[i] - greedy_N[i // 2] for i in range(8)]
  np.testing.assert_array_equal(got.reward, want)
  np.testing.assert_array_equal(got.correct, reward_B)


def test_remax_takes_a_learned_verifier():
  judge = tiny.stages.Stage(
    lambda weight, action, mask: weight * (action * mask).sum(1),
    'judge',
    unbatched=(0,),
  )
  scorer = verifiers.Scorer(
    'judge',
    lambda key: jnp.array(0.25),
    lambda weight, answer, x: judge(weight, x.action, x.mask),
  )
  verify = verifiers.add_scores(None, [scorer])
  policy, key = tiny.policy(), jax.random.key(1)
  above_greedy = advantage_stages.above_greedy(policy, verify, 2)
  params, problem = policy.init(jax.random.key(0)), tiny.problem(rows=4)
  got = above_greedy(
    base.Verdict(jnp.arange(8.0), jnp.zeros(8)),
    base.Version(params, jnp.int32(0)),
    problem,
    key,
    verifiers.init(verify, key),
  )
  keys = jax.random.split(key, 4)
  x = policy.act(params, problem.prompt, keys, greedy=True)
  greedy_N = 0.25 * (x.action * x.mask).sum(1)
  want = np.arange(8.0) - np.repeat(greedy_N, 2)
  np.testing.assert_allclose(got.reward, want)
  workflow = workflows.grpo(
    policy,
    verify,
    optax.sgd(1.0),
    group_size=2,
    advantage=advantages.no_baseline,
    greedy_baseline=True,
  )
  names = {*tiny.trace(workflow, problem).stages}
  assert {'judge', 'above_greedy'} <= names


def test_remax_of_prompts_that_a_step_leaves_unfinished_is_refused():
  with pytest.raises(ValueError, match='greedy_baseline compares'):
    workflows.grpo(
      tiny.policy(),
      tiny.even,
      optax.sgd(1.0),
      group_size=2,
      advantage=advantages.no_baseline,
      greedy_baseline=True,
      rollouts=functools.partial(
        partial_rollout.partial_rollouts, max_carry=1, extra_groups=1
      ),
    )


# KL in the loss or in the reward, and truncated completions.


@pytest.mark.parametrize(
  'kwargs, message',
  [
    ({'kl_coef': 0.1, 'kl_reward_coef': 0.2}, 'set one of them to 0'),
    ({'kl_to_go': True}, 'set kl_reward_coef, or leave kl_to_go out'),
  ],
)
def test_kl_is_in_the_loss_or_in_the_reward(kwargs, message):
  with pytest.raises(ValueError, match=message):
    workflows.grpo(
      tiny.policy(), tiny.even, optax.sgd(1.0), group_size=2, **kwargs
    )


def loss_of(x, **kwargs):
  """Value and gradient of GRPO's loss with respect to log-probabilities."""
  f = objectives.policy(
    lambda params, *_: base.Evaluation(params, jnp.zeros_like(params)),
    aggregate=losses.token_mean,
    **kwargs,
  )

  def value(logp):
    mean = f(logp, x, ())[0][0]
    return mean.sum / mean.count

  return jax.value_and_grad(value)(jnp.nan_to_num(x.logp) + 0.01)


def test_truncated_completions_leave_the_loss_and_its_denominator():
  x, reward_B, _ = batch(3)
  x = x._replace(
    logp=np.nan_to_num(x.logp),
    truncated=(np.arange(8) % 3 == 0).astype(float),
    advantage=reward_B[:, None] * x.mask,
  )
  loss, slope = loss_of(x, mask_truncated=True)
  kept = x.truncated == 0
  want, want_slope = loss_of(
    jax.tree.map(lambda leaf: leaf[kept] if np.ndim(leaf) else leaf, x)
  )
  np.testing.assert_allclose(loss, want, **EXACT)
  np.testing.assert_allclose(slope[kept], want_slope, **EXACT)
  np.testing.assert_array_equal(slope[~kept], 0.0)
