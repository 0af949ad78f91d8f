"""Terms of a loss of tokens: ratios, importance weights, clipping, padding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stages import base
from stages.learn import loss_terms, losses, objectives
from tests.stages.workflows import grpo_cases
import tiny


def test_log_probs_of_padding_do_not_enter_the_loss():
  mask = np.array([[1.0, 1.0, 0.0]], np.float32)
  x = base.Experience(
    (), np.ones((1, 3), np.int32), -mask, mask, (), advantage=mask
  )

  def loss(logp, ref_logp):
    def evaluate(params, x):
      return base.Evaluation(params, jnp.zeros_like(params))

    f = objectives.policy(evaluate, kl=loss_terms.KlPenalty(1.0, losses.kl_k3))
    return jax.value_and_grad(lambda p: f(p, x, ref_logp)[0][0].sum)(logp)

  want = loss(jnp.array([[-1.0, -2.0, 0.0]]), jnp.array([[-2.0, -1.0, 0.0]]))
  for logp, ref_logp in ((-300.0, 0.0), (0.0, -300.0), (-jnp.inf, 0.0)):
    got = loss(
      jnp.array([[-1.0, -2.0, logp]]), jnp.array([[-2.0, -1.0, ref_logp]])
    )
    tiny.assert_same_bits(got, want)


def test_entropies_of_padding_do_not_enter_the_loss():
  mask = np.array([[1.0, 1.0, 0.0]], np.float32)
  x = base.Experience(
    (), np.ones((1, 3), np.int32), -mask, mask, (), advantage=mask
  )

  def loss(of_padding):
    def evaluate(params, x):
      entropy_BT = jnp.array([[0.5, 0.7, of_padding]])
      return base.Evaluation(params, entropy_BT)

    f = objectives.policy(evaluate, entropy_coef=0.1)
    means, info, *_ = f(-jnp.ones((1, 3)), x, ())
    return means, info['train/entropy']

  tiny.assert_same_bits(loss(jnp.nan), loss(0.0))


def _corrected(
  logp,
  proximal,
  behavior,
  advantage,
  weight=losses.token_weight,
  bound=losses.truncated,
  **kwargs,
):
  """GRPO's loss of tokens that an engine sampled, and its gradient."""
  one_BT = np.ones((1, np.size(logp)), np.float32)
  x = base.Experience(
    (),
    one_BT.astype(np.int32),
    jnp.reshape(jnp.float32(behavior), (1, -1)),
    one_BT,
    (),
    advantage=advantage * one_BT,
    proximal=jnp.reshape(jnp.float32(proximal), (1, -1)),
  )
  f = objectives.policy(
    lambda params, *_: base.Evaluation(params, jnp.zeros_like(params)),
    aggregate=losses.token_mean,
    importance=loss_terms.Importance(weight, bound, 2.0),
    **kwargs,
  )
  return jax.value_and_grad(lambda p: f(p, x, ())[0][0].sum)(
    jnp.reshape(jnp.float32(logp), (1, -1))
  )


def test_samples_of_another_engine_are_weighed_and_clipped_around_the_trainer():
  # Ratio e^0.1, weight e^(−1 + 1.5).
  loss, slope = _corrected(-0.9, -1.0, -1.5, advantage=2.0)
  np.testing.assert_allclose(loss, -2 * np.exp(0.1) * np.exp(0.5), rtol=1e-6)
  np.testing.assert_allclose(slope, [[loss]], rtol=1e-6)
  # The weight is capped at 2. A ratio of e^0.3 to the trainer is clipped,
  # though that to the engine is 1.
  loss, slope = _corrected(-0.9, -1.0, -3.0, advantage=2.0)
  np.testing.assert_allclose(loss, -2 * np.exp(0.1) * 2, rtol=1e-6)
  loss, slope = _corrected(-0.7, -1.0, -0.7, advantage=2.0)
  np.testing.assert_allclose(loss, -2 * 1.2 * np.exp(-0.3), rtol=1e-6)
  assert slope == 0


def test_importance_weights_of_sequences_are_worked_by_hand():
  # Ratios e^0.1; each token is e^0.25 likelier to the trainer.
  tokens = [-0.9] * 2, [-1.0] * 2, [-1.25] * 2
  plain = -2 * 2 * np.exp(0.1)
  for weight, want in (
    (losses.token_weight, np.exp(0.25)),
    (losses.sequence_weight, np.exp(0.5)),
    (losses.geometric_weight, np.exp(0.25)),
  ):
    loss, _ = _corrected(*tokens, advantage=2.0, weight=weight)
    np.testing.assert_allclose(loss, plain * want, rtol=1e-6)


def test_a_masked_importance_weight_drops_the_token():
  given = (-0.9, -1.0, -3.0), {'advantage': 2.0}
  loss, slope = _corrected(*given[0], **given[1], bound=losses.masked)
  assert loss == 0 and slope == 0
  assert _corrected(*given[0], **given[1])[0] < 0  # Truncated, it counts.


def test_gspo_clips_the_ratio_of_the_sequence():
  gspo = functools.partial(
    _corrected, advantage=2.0, likelihood=losses.sequence_logp
  )
  # Log-ratios 0.4 and −0.2: 0.1 on average, within the clip of log 1.2.
  loss, slope = gspo([-0.6, -1.2], [-1.0] * 2, [-1.0] * 2)
  np.testing.assert_allclose(loss, 2 * -2 * np.exp(0.1), rtol=1e-6)
  np.testing.assert_allclose(slope, [[loss / 2] * 2], rtol=1e-6)
  # 0.4 and 0.2: the sequence is clipped, both tokens with it.
  loss, slope = gspo([-0.6, -0.8], [-1.0] * 2, [-1.0] * 2)
  np.testing.assert_allclose(loss, 2 * -2 * 1.2, rtol=1e-6)
  np.testing.assert_array_equal(slope, 0.0)


def test_cispo_weighs_the_gradient_of_a_clipped_token():
  loss, slope = _corrected(
    -0.5, -1.0, -1.0, advantage=2.0, policy_loss=losses.cispo
  )
  np.testing.assert_allclose(loss, -1.2 * 2 * -0.5, rtol=1e-6)
  np.testing.assert_allclose(slope, [[-1.2 * 2]], rtol=1e-6)


def test_a_dual_clip_belongs_to_ppo_clip():
  with pytest.raises(
    ValueError, match='dual_clip bounds losses.ppo_clip alone'
  ):
    grpo_cases.grpo(dual_clip=3.0, policy_loss=losses.cispo)

  @functools.wraps(losses.ppo_clip)
  def named_by_gin(*args, **kwargs):
    return losses.ppo_clip(*args, **kwargs)

  grpo_cases.grpo(dual_clip=3.0, policy_loss=named_by_gin)
