"""Losses, their gradients and what they are computed of, against TRL's.

The trainers' own methods run on log-probabilities that are given, so that no
model is needed (`trl_trainers`): of random completions of different lengths.
TRL 1.16 has no trainer for PPO, see `ppo_test`.
"""

import types
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import claims
from stages import base, workflows
from stages.learn import (
  advantages,
  loss_terms,
  losses,
  objectives,
  rollout_correction,
)
from stages.workflows.dpo import objective as dpo_objective
from tests.rlinf_jax.runtime.plans import invariance_test
import tiny
import trl_trainers

pytestmark = [
  pytest.mark.slow,
  pytest.mark.usefixtures('in_float64', 'torch_in_float64'),
  pytest.mark.filterwarnings('ignore'),
]
EXACT = {'rtol': 1e-10, 'atol': 1e-12}
GROUP = 3
SEEDS = claims.some(range(8), (0,))
CAP = 1.3  # Of importance weights.


@pytest.fixture
def torch_in_float64():
  """For the lists of numbers that TRL makes tensors of."""
  torch.set_default_dtype(torch.float64)
  yield
  torch.set_default_dtype(torch.float32)


class Tokens(NamedTuple):
  """Random log-probs [B, T] of ragged completions, and rewards [B].

  Attributes:
    logp: now.
    old: when they were sampled.
    ref: of a reference policy.
    reward: of completions whose groups are adjacent.
    mask: 1 on the tokens of each completion, at least one.
  """

  logp: np.ndarray
  old: np.ndarray
  ref: np.ndarray
  reward: np.ndarray
  mask: np.ndarray


def tokens(seed):
  rng = np.random.default_rng(seed)
  # Pairs of DPO need an even number of rows.
  B, T = 2 * GROUP * rng.integers(1, 4), rng.integers(5, 40)
  old, ref = rng.normal(-2.0, 0.5, (2, B, T))
  logp = old + rng.normal(0.0, 0.3, (B, T))
  length_B1 = rng.integers(1, T + 1, (B, 1))
  length_B1[:2, 0] = 1, T
  mask = (np.arange(T)[None] < length_B1).astype(float)
  return Tokens(logp, old, ref, rng.normal(size=B), mask)


def of_groups(f, reward_B):
  """Advantages [B] that `f` computes for each group."""
  return np.concatenate([f(x) for x in reward_B.reshape(-1, GROUP)])


def ours(logp, old, ref, advantage, mask, proximal=None, **settings):
  """The same of `grpo`'s objective."""
  x = base.Experience(
    (), (), old, mask, (), advantage=advantage, proximal=proximal
  )
  f = objectives.policy(
    lambda params, *_: base.Evaluation(params, jnp.zeros_like(params)),
    **settings,
  )

  def value(logp):
    mean = f(logp, x, ref)[0][0]
    return mean.sum / mean.count

  return jax.value_and_grad(value)(jnp.asarray(logp))


def same(got, want):
  np.testing.assert_allclose(got[0], want[0], **EXACT)
  np.testing.assert_allclose(got[1], want[1], **EXACT)


# TRL's `loss_type`, its other settings, and ours for T tokens.
CASES = {
  'grpo': ({}, lambda T: {}),
  'bnpo': ({}, lambda T: {'aggregate': losses.token_mean}),
  'dapo': ({}, lambda T: {'aggregate': losses.token_mean}),
  'dr_grpo': ({}, lambda T: {'aggregate': losses.constant(T)}),
  'gspo': (
    {'loss_type': 'grpo', 'importance_sampling_level': 'sequence'},
    lambda T: {'likelihood': losses.sequence_logp},
  ),
  'cispo': (
    {'epsilon_high': 1.28},  # The bound itself, not above 1.
    lambda T: {
      'policy_loss': losses.cispo,
      'aggregate': losses.token_mean,
      'clip': loss_terms.Clip(1.0, 0.28),
    },
  ),
}


@pytest.mark.parametrize('seed', SEEDS)
@pytest.mark.parametrize('beta', [0.0, 0.1])
@pytest.mark.parametrize('name', CASES)
def test_losses_of_grpo_are_trls(name, beta, seed):
  from trl.trainer import grpo_trainer  # Takes seconds: not where all collect.

  logp, old, ref, reward_B, mask = tokens(seed)
  advantage_B = of_groups(advantages.group_centered, reward_B)
  trls, settings = CASES[name]
  want = trl_trainers.loss(
    grpo_trainer.GRPOTrainer,
    logp,
    {
      'completion_mask': mask,
      'advantages': advantage_B,
      'old_per_token_logps': old,
      'ref_per_token_logps': ref,
    },
    **{
      'loss_type': name,
      'importance_sampling_level': 'token',
      'epsilon_low': 0.2,
      'epsilon_high': 0.28,
      'beta': beta,
      **trls,
    },
  )
  settings = {'clip': loss_terms.Clip(0.2, 0.28)} | settings(logp.shape[1])
  got = ours(
    logp,
    old,
    ref if beta else (),
    advantage_B[:, None] * mask,
    mask,
    kl=loss_terms.KlPenalty(beta, losses.kl_k3),
    **settings,
  )
  same(got, want)


@pytest.mark.parametrize('seed', SEEDS)
def test_the_loss_of_rloo_is_trls(seed):
  from trl.trainer import rloo_trainer

  logp, old, _, reward_B, mask = tokens(seed)
  advantage_B = of_groups(advantages.leave_one_out, reward_B)
  want = trl_trainers.loss(
    rloo_trainer.RLOOTrainer,
    logp,
    {
      'completion_mask': mask,
      'advantages': advantage_B,
      'old_logps': (old * mask).sum(1),
    },
    epsilon_low=0.2,
    epsilon_high=0.2,
  )
  got = ours(
    logp,
    old,
    (),
    advantage_B[:, None] * mask,
    mask,
    likelihood=losses.sequence_sum_logp,
  )
  same(got, want)


@pytest.mark.parametrize('seed', SEEDS)
def test_the_loss_and_the_metrics_of_dpo_are_trls(seed):
  from trl.trainer import dpo_trainer

  logp, _, ref, _, mask = tokens(seed)
  B, T = logp.shape
  ref_logp_B = (ref * mask).sum(1)
  # TRL has all chosen completions first, and a position before the first token.
  halves = np.r_[0:B:2, 1:B:2]
  given = torch.tensor((logp * mask)[halves], requires_grad=True)

  def model(**kwargs):
    del kwargs
    zero = torch.zeros(B, T)
    return types.SimpleNamespace(
      log_probs=given, entropy=zero, mean_logits=zero, is_top1=zero.bool()
    )

  mask_T1 = np.concatenate([np.zeros((B, 1)), mask[halves]], axis=1)
  inputs = {
    'input_ids': torch.zeros(B, T + 1, dtype=torch.long),
    'attention_mask': torch.ones(B, T + 1),
    'completion_mask': torch.tensor(mask_T1),
    'ref_chosen_logps': torch.tensor(ref_logp_B[0::2]),
    'ref_rejected_logps': torch.tensor(ref_logp_B[1::2]),
  }
  fake = trl_trainers.trainer(
    given,
    beta=0.1,
    label_smoothing=0.0,
    ld_alpha=None,
    precompute_ref_logps=True,
    f_divergence_type='reverse_kl',
    loss_types=['sigmoid'],
    loss_weights=[1.0],
    use_weighting=False,
  )
  loss = dpo_trainer.DPOTrainer._compute_loss(fake, model, inputs, False)
  loss.backward()

  class Table:
    packed_tokens = None

    @staticmethod
    def evaluate(params, obs, action, *, group_size):
      del obs, action, group_size
      return base.Evaluation(params, jnp.zeros_like(params))

  f = dpo_objective(Table, 0.1, 0.0)
  example = base.Example((), mask, mask)

  def value(logp):
    mean = f(logp, example, ref_logp_B).means[0]
    return mean.sum / mean.count

  got = jax.value_and_grad(value)(jnp.asarray(logp))
  np.testing.assert_allclose(got[0], loss.item(), **EXACT)
  slope = (given.grad.numpy() * mask[halves])[np.argsort(halves)]
  np.testing.assert_allclose(got[1], slope, **EXACT)
  info = f(jnp.asarray(logp), example, ref_logp_B).info
  for mine, trls in {
    'reward_chosen': 'rewards/chosen',
    'reward_rejected': 'rewards/rejected',
    'reward_margin': 'rewards/margins',
    'accuracy': 'rewards/accuracies',
    'logp_chosen': 'logps/chosen',
    'logp_rejected': 'logps/rejected',
  }.items():
    mean = info[f'train/{mine}']
    (want,) = fake._metrics['train'][trls]
    np.testing.assert_allclose(mean.sum / mean.count, want, err_msg=mine)


# Settings of TRL, and ours.
ADVANTAGES = {
  'grpo': ({'scale_rewards': 'group'}, advantages.group_relative),
  'dr_grpo': ({'scale_rewards': 'none'}, advantages.group_centered),
  'rloo': (
    {'normalize_advantages': False, 'reward_clip_range': None},
    advantages.leave_one_out,
  ),
}


@pytest.mark.parametrize('seed', SEEDS)
@pytest.mark.parametrize('name', ADVANTAGES)
def test_advantages_are_trls(name, seed):
  from trl.trainer import grpo_trainer, rloo_trainer

  x, (settings, ours) = tokens(seed), ADVANTAGES[name]
  inputs, _ = trl_trainers.rollout(
    rloo_trainer.RLOOTrainer if name == 'rloo' else grpo_trainer.GRPOTrainer,
    x.reward,
    x.mask,
    x.old,
    x.old,
    num_generations=GROUP,
    **settings,
  )
  got, want = of_groups(ours, x.reward), inputs['advantages']
  if name == 'grpo':  # Each adds a number of its own to the deviation.
    std_N = x.reward.reshape(-1, GROUP).std(1, ddof=1)
    std = np.repeat(std_N, GROUP)
    got, want = got * (std + 1e-6), want * (std + 1e-4)
  np.testing.assert_allclose(got, want, **EXACT)


# TRL's `vllm_importance_sampling_mode` and least weight, and ours.
CORRECTIONS = {
  'token_truncate': (None, losses.token_weight, losses.truncated),
  'token_mask': (1 / CAP, losses.token_weight, losses.masked),
  'sequence_truncate': (None, losses.sequence_weight, losses.truncated),
  'sequence_mask': (1 / CAP, losses.sequence_weight, losses.masked),
}


@pytest.mark.parametrize('seed', SEEDS)
@pytest.mark.parametrize('mode', CORRECTIONS)
def test_the_correction_of_an_engines_probabilities_is_trls(mode, seed):
  from trl.trainer import grpo_trainer

  x = tokens(seed)
  noise = np.random.default_rng(seed).normal(0.0, 0.2, x.old.shape)
  behavior, proximal = x.old + noise, x.old
  least, weight, bound = CORRECTIONS[mode]
  settings = {
    'use_vllm': True,
    'vllm_importance_sampling_correction': True,
    'vllm_importance_sampling_mode': mode,
    'vllm_importance_sampling_clip_min': least,
    'vllm_importance_sampling_clip_max': CAP,
  }
  inputs, metrics = trl_trainers.rollout(
    grpo_trainer.GRPOTrainer,
    x.reward,
    x.mask,
    proximal,
    behavior,
    num_generations=GROUP,
    scale_rewards='none',
    **settings,
  )
  ratio = inputs['importance_sampling_ratio']
  bounded = (ratio == 0.0) if least else (ratio == CAP)
  assert 0 < bounded.mean() < 1
  want = trl_trainers.loss(
    grpo_trainer.GRPOTrainer,
    x.logp,
    inputs,
    loss_type='dapo',
    importance_sampling_level='token',
    epsilon_low=0.2,
    epsilon_high=0.28,
    beta=0.0,
    **settings,
  )
  advantage_B = of_groups(advantages.group_centered, x.reward)
  got = ours(
    x.logp,
    behavior,
    (),
    advantage_B[:, None] * x.mask,
    x.mask,
    proximal,
    clip=loss_terms.Clip(0.2, 0.28),
    aggregate=losses.token_mean,
    importance=loss_terms.Importance(weight, bound, CAP),
  )
  same(got, want)
  gap = rollout_correction.logprob_gap(
    base.Experience((), (), behavior, x.mask, (), proximal=proximal)
  )
  for name, number in tiny.read(gap).items():
    trls = name.replace('rollout/logprob_gap_', 'sampling_logp_difference/')
    (want,) = metrics[f'sampling/{trls}']
    np.testing.assert_allclose(number, want, **EXACT, err_msg=name)


@pytest.mark.parametrize('seed', SEEDS)
def test_the_loss_of_fine_tuning_is_trls(seed):
  x = tokens(seed)
  policy = base.Policy(
    init=lambda key: jnp.asarray(x.logp),
    act=None,
    evaluate=lambda params, *_, group_size: base.Evaluation(
      params, jnp.zeros_like(params)
    ),
  )
  workflow = workflows.sft(policy, None, invariance_test.KEEP)
  ones = np.ones((len(x.mask), 1), np.int32)
  example = base.Example(
    base.Prompt(ones, ones), x.mask.astype(np.int32), x.mask
  )
  key = jax.random.key(0)
  state, info = workflow.step(workflow.init(key), example, key)
  got = tiny.read(info)['train/loss'], state.opt_state[0].trace
  same(got, trl_trainers.fine_tuning_loss(x.logp, x.mask))
