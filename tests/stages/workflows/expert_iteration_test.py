"""Expert iteration and best-of-n: what is kept, and what is learned of it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from stages import base, workflows
from stages.learn import losses, objectives, optimizers, selection
from stages.workflows.expert_iteration import count_kept, select_stage
import tiny
from tiny import read

KEY = jax.random.key(0)


def test_the_right_ones_or_the_first_of_the_best_are_kept():
  reward_G = jnp.array([0.1, 0.7, 0.7, 0.3])
  correct_G = jnp.array([0.0, 1.0, 1.0, 0.0])
  kept = selection.correct(reward_G, correct_G)
  np.testing.assert_array_equal(kept, [0, 1, 1, 0])
  np.testing.assert_array_equal(
    selection.best(reward_G, correct_G), [0, 1, 0, 0]
  )
  # One is the best even where none is right.
  np.testing.assert_array_equal(selection.best(jnp.zeros(2), 0), [1, 0])


@pytest.mark.parametrize('keep', [selection.correct, selection.best])
@pytest.mark.parametrize('seed', range(3))
def test_the_loss_is_the_mean_over_tokens_of_kept_completions(
  in_float64, seed, keep
):
  rng = np.random.default_rng(seed)
  N, G, T = 3, 4, 5
  reward_B = rng.normal(size=N * G)
  correct_B = rng.integers(0, 2, N * G).astype(float)
  length_B = rng.integers(1, T + 1, N * G)
  mask_BT = (np.arange(T)[None] < length_B[:, None]).astype(float)
  logp_BT = rng.normal(-2.0, 1.0, (N * G, T))
  verdict = base.Verdict(jnp.asarray(reward_B), jnp.asarray(correct_B))
  kept_BT = select_stage(keep, G)(verdict, mask_BT)

  kept, total, count = [], 0.0, 0
  for n in range(N):
    rows = range(n * G, n * G + G)
    if keep is selection.correct:
      kept += [b for b in rows if correct_B[b]]
    else:
      kept += [max(rows, key=lambda b: reward_B[b])]
  for b in kept:
    total -= logp_BT[b, : length_B[b]].sum()
    count += length_B[b]
  x = base.Experience((), (), logp_BT, kept_BT, (), advantage=kept_BT)
  f = objectives.policy(
    lambda params, *_: base.Evaluation(params, jnp.zeros_like(params)),
    policy_loss=lambda logp, old, kept, low, high: -kept * logp,
    aggregate=losses.token_mean,
  )
  mean = f(logp_BT, x, ())[0][0]
  np.testing.assert_allclose(mean.sum / mean.count, total / count, rtol=1e-12)
  share = read(count_kept(kept_BT, mask_BT))['rollout/kept']
  np.testing.assert_allclose(share, len(kept) / (N * G), rtol=1e-12)


def test_a_completion_whose_reward_failed_is_never_the_best():
  """Failed ones have a reward of 0; the last group has no other."""
  nan = jnp.nan  # Verdicts on padding rows are arbitrary.
  reward_NG = jnp.array([[-1, 0, -0.5], [0, 0, 0], [nan, -2, -3], [0, 0, 0]])
  failed_NG = jnp.array([[0, 1, 0], [1, 0, 0], [0, 0, 0], [1, 1, 1]])
  mask_BT = jnp.ones((12, 2)).at[6].set(0.0)
  verdict = base.Verdict(
    reward_NG.ravel(), jnp.ones(12), {'failed': failed_NG.ravel() * 1.0}
  )
  kept_BT = select_stage(selection.best, 3)(verdict, mask_BT)
  want = [[0, 0, 1], [0, 1, 0], [0, 1, 0], [0, 0, 0]]
  np.testing.assert_array_equal(kept_BT[:, 0].reshape(4, 3), want)
  kept_BT = select_stage(selection.correct, 3)(verdict, mask_BT)
  np.testing.assert_array_equal(
    kept_BT[:, 1].reshape(4, 3), (1 - failed_NG) * mask_BT[:, 0].reshape(4, 3)
  )
  # A verdict without terms has not failed.
  plain = verdict._replace(terms=())
  kept_BT = select_stage(selection.best, 3)(plain, mask_BT)
  np.testing.assert_array_equal(kept_BT[:3, 0], [0, 1, 0])


@pytest.mark.slow
@pytest.mark.parametrize('keep', [selection.correct, selection.best])
def test_expert_iteration_learns(keep):
  workflow = workflows.expert_iteration(
    tiny.policy(length=4),
    tiny.even,
    optimizers.adamw(1e-2),
    group_size=8,
    keep=keep,
  )
  state, rewards = workflow.init(KEY), []
  for i in range(20):
    key = jax.random.fold_in(KEY, i)
    state, info = workflow.step(state, tiny.problem(seed=i), key)
    rewards.append(read(info)['rollout/reward_mean'])
  assert rewards[0] < 0.6 < 0.8 < np.mean(rewards[-3:])


@pytest.mark.slow
def test_a_batch_without_a_right_completion_changes_nothing():
  @tiny.stages.stage('reward')
  def never(answer, action, mask):
    zero_B = 0.0 * mask[:, 0]
    return base.Verdict(zero_B, zero_B)

  workflow = workflows.expert_iteration(
    tiny.policy(length=4), never, optax.sgd(1.0), group_size=2
  )
  state = workflow.init(KEY)
  after, info = workflow.step(state, tiny.problem(), KEY)
  tiny.assert_same_bits(after.actor.params, state.actor.params)
  assert read(info)['rollout/kept'] == 0
