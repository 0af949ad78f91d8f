"""DPO: its loss, what does not count, and that it learns what is preferred."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from stages import base, workflows
from stages.learn import losses, optimizers
from stages.workflows.dpo import objective
import tiny
from tiny import read

KEY = jax.random.key(0)
EXACT = {'rtol': 1e-10, 'atol': 1e-10}  # Another order of some float64 sums.


def log_sigmoid(x):
  return -np.logaddexp(0.0, -x)


class Table:
  """A policy whose parameters are the log-probabilities of its actions."""

  packed_tokens = None

  @staticmethod
  def evaluate(params, obs, action, *, group_size):
    del obs, action, group_size
    return base.Evaluation(params, jnp.zeros_like(params))


def random_pairs(seed, pairs=5, tokens=6):
  """Log-probs, reference log-probs of completions, and their mask."""
  rng = np.random.default_rng(seed)
  length_B = rng.integers(1, tokens + 1, 2 * pairs)
  mask_BT = (np.arange(tokens)[None] < length_B[:, None]).astype(float)
  logp_BT = rng.normal(-2.0, 1.0, mask_BT.shape)
  return logp_BT, rng.normal(-7.0, 3.0, 2 * pairs), mask_BT


@pytest.mark.parametrize('smoothing', [0.0, 0.2])
@pytest.mark.parametrize('seed', range(3))
def test_the_loss_of_pairs_is_that_of_the_paper(in_float64, seed, smoothing):
  logp_BT, ref_logp_B, mask_BT = random_pairs(seed)

  def oracle(logp_BT):
    total = 0.0
    for i in range(0, len(logp_BT), 2):
      reward = [
        0.3 * (sum(logp_BT[b][mask_BT[b] > 0]) - ref_logp_B[b])
        for b in (i, i + 1)
      ]
      margin = reward[0] - reward[1]
      total -= (1 - smoothing) * log_sigmoid(margin)
      total -= smoothing * log_sigmoid(-margin)
    return total / (len(logp_BT) // 2)

  f = objective(Table, 0.3, smoothing)

  def ours(logp_BT):
    mean = f(logp_BT, base.Example((), mask_BT, mask_BT), ref_logp_B).means[0]
    return mean.sum / mean.count

  np.testing.assert_allclose(ours(logp_BT), oracle(logp_BT), **EXACT)
  slope = np.zeros_like(logp_BT)
  for at in np.ndindex(logp_BT.shape):
    step = np.zeros_like(logp_BT)
    step[at] = 1e-5
    slope[at] = (oracle(logp_BT + step) - oracle(logp_BT - step)) / 2e-5
  np.testing.assert_allclose(jax.grad(ours)(logp_BT), slope, atol=1e-9)


def test_a_pair_by_hand():
  # Rewards 0.5 · (−2 + 3) and 0.5 · (−1 + 2): no margin.
  np.testing.assert_allclose(losses.preference(0.0), np.log(2), rtol=1e-6)
  np.testing.assert_allclose(losses.preference(-100.0), 100.0, rtol=1e-6)
  assert losses.preference(100.0) < 1e-6


def test_padding_and_pairs_without_tokens_do_not_count(in_float64):
  logp_BT, ref_logp_B, mask_BT = random_pairs(0)
  mask_BT[2:4] = 0.0
  f = objective(Table, 0.3, 0.0)

  def metrics_of(logp_BT, rows=slice(None)):
    x = base.Example((), mask_BT[rows], mask_BT[rows])
    return read(f(logp_BT[rows], x, ref_logp_B[rows]).info)

  noisy_BT = np.where(mask_BT > 0, logp_BT, -np.inf)
  kept = np.r_[0:2, 4:10]
  want = metrics_of(logp_BT, kept)
  for name, value in metrics_of(noisy_BT).items():
    np.testing.assert_allclose(value, want[name], err_msg=name, **EXACT)
  assert set(want) >= {
    'train/loss', 'train/accuracy', 'train/reward_margin',
    'train/reward_chosen', 'train/reward_rejected'
  }  # fmt: skip


@pytest.mark.slow
def test_dpo_learns_what_is_preferred_and_leaves_its_reference_alone():
  workflow = workflows.dpo(tiny.policy(), optimizers.adamw(3e-3), beta=0.5)
  first = state = workflow.init(KEY)
  before = read(workflow.evaluate(state, tiny.pairs(), KEY))
  assert before['eval/loss'] == pytest.approx(np.log(2), abs=1e-6)
  for _ in range(20):
    state, info = workflow.step(state, tiny.pairs(), KEY)
  numbers = read(info)
  after = read(workflow.evaluate(state, tiny.pairs(), KEY))
  assert after['eval/accuracy'] == 1.0
  assert after['eval/loss'] < 0.5 * before['eval/loss']
  margin = numbers['train/reward_chosen'] - numbers['train/reward_rejected']
  np.testing.assert_allclose(numbers['train/reward_margin'], margin, rtol=1e-4)
  tiny.assert_same_bits(state.reference, first.actor.params)


def test_sft_reads_no_log_probability_of_padding():
  x = tiny.examples()
  params = jnp.where(x.mask > 0, -1.0, -jnp.inf)
  policy = tiny.policy()._replace(
    init=lambda key: params,
    evaluate=lambda params, *_, **__: base.Evaluation(params, params),
  )
  workflow = workflows.sft(policy, None, optax.sgd(1.0))
  state = workflow.init(KEY)
  assert read(workflow.evaluate(state, x, KEY))['eval/loss'] == 1.0
  state, info = workflow.step(state, x, KEY)
  assert read(info)['train/loss'] == 1.0
  assert np.isfinite(state.params[x.mask > 0]).all()


@pytest.mark.slow
def test_sft_without_a_verifier_measures_held_out_examples():
  workflow = workflows.sft(tiny.policy(), None, optax.sgd(0.0))
  state, x = workflow.init(KEY), tiny.examples()
  numbers = read(workflow.evaluate(state, x, KEY))
  logp_BT = np.asarray(
    tiny.policy().evaluate(state.params, x.prompt, x.action).logp
  )
  real = logp_BT[x.mask > 0]
  np.testing.assert_allclose(numbers['eval/loss'], -real.mean(), rtol=1e-5)
  np.testing.assert_allclose(
    numbers[workflow.score], np.exp(real).mean(), rtol=1e-5
  )
