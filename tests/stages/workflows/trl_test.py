"""Losses and their gradients against those of TRL's trainers.

The trainers' own `_compute_loss` runs on log-probabilities that are given, so
that no model is needed. Needs TRL 1.16 with accelerate and datasets, which no
extra installs: `pip install --target FOLDER trl==1.16.0`, and PYTHONPATH.
"""

import collections
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stages import base
from stages.learn import advantages, loss_terms, losses, objectives
from stages.workflows.dpo import objective as dpo_objective

REASON = 'TRL, accelerate or datasets are not installed.'
trl = pytest.importorskip('trl', reason=REASON)
torch = pytest.importorskip('torch', reason=REASON)
pytest.importorskip('datasets', reason=REASON)
pytest.importorskip('accelerate', reason=REASON)

pytestmark = [
  pytest.mark.slow,
  pytest.mark.usefixtures('in_float64'),
  pytest.mark.filterwarnings('ignore'),
]
EXACT = {'rtol': 1e-10, 'atol': 1e-12}
B, T = 6, 5


def tokens(seed):
  """Log-probs now, before, of a reference; rewards in groups; and a mask."""
  rng = np.random.default_rng(seed)
  old, ref = rng.normal(-2.0, 0.5, (2, B, T))
  logp = old + rng.normal(0.0, 0.3, (B, T))
  length_B1 = rng.integers(1, T + 1, (B, 1))
  mask = (np.arange(T)[None] < length_B1).astype(float)
  return logp, old, ref, rng.normal(size=B), mask


def trainer(logp, **settings):
  """The attributes of a trainer that its loss reads."""
  same = lambda x, *_, **__: x
  return types.SimpleNamespace(
    model=types.SimpleNamespace(training=True),
    accelerator=types.SimpleNamespace(
      device='cpu',
      num_processes=1,
      gather=same,
      gather_for_metrics=same,
      reduce=same,
      sync_gradients=True,
    ),
    args=types.SimpleNamespace(
      delta=None, use_bias_correction_kl=False, steps_per_generation=1
    ),
    _metrics=collections.defaultdict(lambda: collections.defaultdict(list)),
    _get_per_token_logps_and_entropies=lambda *_, **__: (
      logp,
      torch.zeros_like(logp),
      None,
    ),
    _entropy_bonus_enabled=False,
    _total_train_tokens=0,
    _tp_size=1,
    aux_loss_enabled=False,
    current_gradient_accumulation_steps=1,
    off_policy_mask_threshold=None,
    top_entropy_quantile=1.0,
    use_vllm=False,
    vllm_importance_sampling_correction=False,
    max_completion_length=T,
    **settings,
  )


def theirs(kind, logp, inputs, **settings):
  """A trainer's loss and its gradient with respect to log-probabilities."""
  given = {
    'prompt_ids': torch.zeros(B, 1, dtype=torch.long),
    'prompt_mask': torch.ones(B, 1),
    'completion_ids': torch.zeros(B, T, dtype=torch.long),
    **{name: torch.tensor(x) for name, x in inputs.items()},
  }
  given['num_items_in_batch'] = given['completion_mask'].sum()
  logp = torch.tensor(logp, requires_grad=True)
  loss = kind._compute_loss(trainer(logp, **settings), None, given)
  loss.backward()
  return loss.item(), logp.grad.numpy()


def ours(logp, old, ref, advantage, mask, **settings):
  """The same of `grpo`'s objective."""
  x = base.Experience((), (), old, mask, (), advantage=advantage)
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


# TRL's `loss_type`, its other settings, and ours.
CASES = {
  'grpo': ({}, {}),
  'bnpo': ({}, {'aggregate': losses.token_mean}),
  'dapo': ({}, {'aggregate': losses.token_mean}),
  'dr_grpo': ({}, {'aggregate': losses.constant(T)}),
  'gspo': (
    {'loss_type': 'grpo', 'importance_sampling_level': 'sequence'},
    {'likelihood': losses.sequence_logp},
  ),
  'cispo': (
    {'epsilon_high': 1.28},  # The bound itself, not above 1.
    {
      'policy_loss': losses.cispo,
      'aggregate': losses.token_mean,
      'clip': (1.0, 0.28, None),
    },
  ),
}


@pytest.mark.parametrize('beta', [0.0, 0.1])
@pytest.mark.parametrize('name', CASES)
def test_losses_of_grpo_are_trls(name, beta):
  from trl.trainer import grpo_trainer

  logp, old, ref, reward_B, mask = tokens(0)
  advantage = advantages.group_centered(reward_B)[:, None] * mask
  trls, settings = CASES[name]
  want = theirs(
    grpo_trainer.GRPOTrainer,
    logp,
    {
      'completion_mask': mask,
      'advantages': np.asarray(advantages.group_centered(reward_B)),
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
  settings = {'clip': (0.2, 0.28, None), **settings}
  got = ours(
    logp,
    old,
    ref if beta else (),
    advantage,
    mask,
    kl=loss_terms.KlPenalty(beta, losses.kl_k3),
    **settings,
  )
  same(got, want)


def test_the_loss_of_rloo_is_trls():
  from trl.trainer import rloo_trainer

  logp, old, _, reward_B, mask = tokens(1)
  advantage_B = np.concatenate(
    [advantages.leave_one_out(group) for group in reward_B.reshape(-1, 3)]
  )
  want = theirs(
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


def test_the_loss_and_the_metrics_of_dpo_are_trls():
  from trl.trainer import dpo_trainer

  logp, _, ref, _, mask = tokens(2)
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
  fake = trainer(
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
