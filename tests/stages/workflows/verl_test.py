"""PPO's advantages, losses and gradients against the functions of verl.

verl 0.9.1 asks for another antlr4 than math-verify, so it is not among the
requirements of tests: the claim `ppo_is_verls` puts it into a folder.
"""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import claims
from stages import base
from stages.learn import advantages, loss_terms, losses, objectives
from stages.workflows.ppo import compute_advantages, critic_loss
from tests.stages.workflows import trl_test

verl = pytest.importorskip(
  'verl.trainer.ppo.core_algos',
  reason='verl is not installed: make claims NAMES=ppo_is_verls.',
  exc_type=ImportError,
)
pytestmark = pytest.mark.usefixtures('in_float64')

SEEDS = claims.some(range(8), (0,))
DISCOUNT, LAMBDA, PENALTY = 0.97, 0.9, 0.2
LOW, HIGH, DUAL = 0.2, 0.28, 1.3
VALUE_COEF, VALUE_CLIP = 0.1, 0.2


def verls(tokens, value):
  """Whitened advantages, and returns, as in verl's trainer."""
  old, ref, reward, mask, value = map(
    torch.tensor, (tokens.old, tokens.ref, tokens.reward, tokens.mask, value)
  )
  reward_BT = -PENALTY * verl.kl_penalty(old, ref, 'kl')
  last = mask.sum(1).long() - 1
  reward_BT[torch.arange(len(last)), last] += reward
  advantage_BT, return_BT = verl.compute_gae_advantage_return(
    reward_BT * mask, value, mask, DISCOUNT, LAMBDA
  )
  # It whitens padding, too.
  return (advantage_BT * mask).numpy(), (return_BT * mask).numpy()


def verls_loss(logp, value, advantage, return_, tokens, old_value):
  """verl's clipped loss of the policy and of the critic."""
  mask = torch.tensor(tokens.mask)
  settings = types.SimpleNamespace(
    clip_ratio=LOW,
    clip_ratio_low=LOW,
    clip_ratio_high=HIGH,
    get={'clip_ratio_c': DUAL}.get,
    global_batch_info={},
  )
  policy_loss, info = verl.compute_policy_loss_vanilla(
    torch.tensor(tokens.old), logp, advantage, mask, config=settings
  )
  value_loss, clipped = verl.compute_value_loss(
    value, return_, torch.tensor(old_value), mask, VALUE_CLIP
  )
  assert 0 < info['actor/pg_clipfrac'] < 1
  assert 0 < info['actor/pg_clipfrac_lower'] < 1 and 0 < clipped < 1
  return policy_loss + VALUE_COEF * value_loss


def ours_loss(params, x):
  loss = objectives.policy(
    lambda params, *_: base.Evaluation(
      params[0], jnp.zeros_like(params[0]), params[1]
    ),
    clip=loss_terms.Clip(LOW, HIGH, DUAL),
    aggregate=losses.token_mean,
    critic_loss=critic_loss(VALUE_COEF, VALUE_CLIP),
  )
  mean = loss(params, x, ())[0][0]
  return mean.sum / mean.count


@pytest.mark.parametrize('seed', SEEDS)
def test_advantages_losses_and_gradients_are_verls(seed):
  tokens = trl_test.tokens(seed)
  mask, rng = tokens.mask, np.random.default_rng(100 + seed)
  old_value, change = rng.normal(0.0, 0.4, (2, *mask.shape))
  got = compute_advantages(
    (DISCOUNT, 1.0),
    (LAMBDA, None),
    PENALTY,
    tokens.reward,
    tokens.old,
    tokens.ref,
    old_value,
    mask,
  )
  whitened, return_ = verls(tokens, old_value)
  # verl's variance is the unbiased one.
  n = mask.sum()
  ours = advantages.whiten(got['advantage'], mask) * np.sqrt((n - 1) / n)
  np.testing.assert_allclose(ours, whitened, rtol=1e-7, atol=1e-9)
  np.testing.assert_allclose(
    got['return_'] * mask, return_, rtol=1e-10, atol=1e-12
  )

  params = tokens.logp, old_value + change
  x = base.Experience((), (), tokens.old, mask, (), **got)
  value, slopes = jax.value_and_grad(ours_loss)(
    jax.tree.map(jnp.asarray, params), x
  )
  theirs = [torch.tensor(p, requires_grad=True) for p in params]
  given = (torch.tensor(np.asarray(got[k])) for k in ('advantage', 'return_'))
  expected = verls_loss(*theirs, *given, tokens, old_value)
  expected.backward()
  np.testing.assert_allclose(value, expected.item(), rtol=1e-10)
  for slope, param in zip(slopes, theirs, strict=True):
    np.testing.assert_allclose(slope, param.grad, rtol=1e-9, atol=1e-12)
