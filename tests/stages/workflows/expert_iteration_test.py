"""Expert iteration and best-of-n: what is kept, and what is learned of it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from stages import base, workflows
from stages.learn import losses, objectives, optimizers, selection
from stages.workflows.expert_iteration import count_kept, select_stage
from tests.rlinf_jax.runtime.plans import invariance_test
import tiny
from tiny import read

KEY = jax.random.key(0)
KEEP = invariance_test.KEEP  # Keeps the gradient in its state.


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


def test_a_kl_penalty_lowers_the_rewards_that_are_compared(in_float64):
  rng = np.random.default_rng(0)
  N, G, T, coef = 6, 4, 5, 0.3
  reward_B = rng.normal(size=N * G)
  length_B = rng.integers(1, T + 1, N * G)
  logp_BT, ref_BT = rng.normal(size=(2, N * G, T))
  mask_BT = (np.arange(T)[None] < length_B[:, None]).astype(float)
  verdict = base.Verdict(jnp.asarray(reward_B), jnp.ones(N * G))
  want, moved = [], 0
  for n in range(N):
    lowered = {}
    for b in range(n * G, n * G + G):
      gap = sum(logp_BT[b, t] - ref_BT[b, t] for t in range(length_B[b]))
      lowered[b] = reward_B[b] - coef * gap
    want.append(max(lowered, key=lowered.get))
    moved += want[-1] != n * G + reward_B[n * G : n * G + G].argmax()
  assert moved
  padding_BT = np.where(mask_BT > 0, 0.0, np.nan)
  select = select_stage(selection.best, G, coef)
  kept_BT = select(verdict, mask_BT, logp_BT + padding_BT, ref_BT)
  np.testing.assert_array_equal(np.flatnonzero(kept_BT[:, 0]), want)


def expert_iteration(optimizer=KEEP, **kwargs):
  return workflows.expert_iteration(
    tiny.policy(length=4),
    tiny.even,
    optimizer,
    group_size=4,
    num_epochs=1,
    **kwargs,
  )


def test_a_penalty_that_is_not_read_is_refused():
  with pytest.raises(ValueError, match='selection.correct keeps all correct'):
    expert_iteration(kl_reward_coef=0.1)
  with pytest.raises(ValueError, match='set one of them to 0'):
    expert_iteration(keep=selection.best, kl_coef=0.1, kl_reward_coef=0.1)


@pytest.mark.slow
@pytest.mark.parametrize('weight', [None, losses.token_weight])
def test_stale_samples_are_examples_unless_they_are_weighted(weight):
  """The update is Σ k w ∇lp / Σ k m, where older parameters sampled."""
  late = expert_iteration(staleness=1, importance_weight=weight)
  state = invariance_test.begin(late)
  behavior = late.init(jax.random.key(1)).actor.params
  (past,) = state.past
  state = state._replace(past=(past._replace(params=behavior),))
  problem = jax.tree.map(jnp.asarray, tiny.problem())
  after, info = late.step(state, problem, KEY)
  policy = tiny.policy(length=4)
  prompt = jax.tree.map(lambda x: jnp.repeat(x, 4, axis=0), problem.prompt)
  x = policy.act(behavior, prompt, tiny.stages.keys(KEY, prompt), group_size=4)
  correct_B = tiny.even(problem.answer, x.action, x.mask).correct
  kept_BT = x.mask * correct_B[:, None]

  def mean(params):
    logp_BT = policy.evaluate(params, prompt, x.action, group_size=4).logp
    weight_BT = 1.0
    if weight:
      ratio_BT = jnp.exp(jax.lax.stop_gradient(logp_BT) - x.logp)
      weight_BT = jnp.minimum(ratio_BT, 2.0)
    return -(kept_BT * weight_BT * logp_BT).sum() / kept_BT.sum()

  want = jax.grad(mean)(state.actor.params)
  assert invariance_test.apart(invariance_test.gradient(after), want) < 1e-4
  assert ('rollout/logprob_gap_max' in read(info)) == bool(weight)


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


def test_the_rounding_of_a_penalty_decides_nothing():
  reward_G = jnp.array([0.0, 1.0, 1.0 + 1e-6, 1.0 - 1e-6])
  kept = selection.best(reward_G, reward_G > 0)
  np.testing.assert_array_equal(kept, [0.0, 1.0, 0.0, 0.0])
