"""Metrics of sampled completions."""

from collections.abc import Callable
import functools

import jax
import jax.numpy as jnp

import stages
from stages import base, metrics
from stages.language import evaluate as evaluate_lib
from stages.language import policy_stages
from stages.language.scoring import packing
from stages.learn import advantages, rollout_correction


def measure(group_size: int, updates_per_step: int) -> stages.Stage:
  """Returns a stage `experience, verdict, actor_step -> info` of `describe`."""
  return stages.Stage(
    functools.partial(
      describe, group_size=group_size, updates_per_step=updates_per_step
    ),
    'measure',
    'sum',
    unbatched=(2,),
    group_size=group_size,
  )


def describe(
  x: base.Experience,
  verdict: base.Verdict,
  actor_step,
  group_size: int,
  updates_per_step: int,
) -> base.Info:
  """Rewards, lengths and staleness of completions, and one group of samples.

  Rows without a token of the policy's are padding, or their environment failed;
  they do not count, except in the number of those that failed.

  Args:
    x: experience in groups.
    verdict: its rewards; arbitrary on rows that do not count.
    actor_step: updates that the actor has made so far.
    group_size: adjacent rows that share a prompt.
    updates_per_step: updates of the actor in a step, the unit of staleness.
  """
  kept_B = x.mask.max(1)
  kept_NG = kept_B.reshape(-1, group_size)
  verdict = jax.tree.map(
    lambda x_B: jnp.where(kept_B > 0, x_B, 0), verdict._replace(turns=None)
  )
  reward_NG = jax.vmap(advantages.fill_rewards)(
    verdict.reward.reshape(-1, group_size), kept_NG
  )
  degenerate_N = reward_NG.max(1) == reward_NG.min(1)
  length_B, T = x.mask.sum(1), x.mask.shape[1]
  stale_BT = (actor_step - x.version).astype(jnp.float32) / updates_per_step
  stale_BT = jnp.where(x.mask > 0, stale_BT, 0.0)
  return (
    rollout_correction.logprob_gap(x)
    | failures(x)
    | {
      'rollout/reward': metrics.moments(verdict.reward, kept_B),
      'rollout/accuracy': metrics.mean(verdict.correct, kept_B),
      **evaluate_lib.verdict_terms(verdict, 'rollout', kept_B),
      'rollout/groups_degenerate': metrics.mean(
        degenerate_N.astype(jnp.float32), kept_NG.max(1)
      ),
      'rollout/response_length': metrics.histogram(length_B, T + 1, kept_B),
      'rollout/truncated_fraction': metrics.mean(x.truncated, kept_B),
      'rollout/staleness': metrics.mean(stale_BT, x.mask),
      'rollout/staleness_max': metrics.maximum(stale_BT),
      'rollout/tokens': length_B.sum(),
      'rollout/padding': padding(x.obs.mask, x.mask, group_size),
      'rollout/samples': metrics.first_rows(
        evaluate_lib.rows_to_log(x, verdict.reward), group_size
      ),
    }
  )


def failures(x: base.Experience) -> base.Info:
  """Number of rows whose environment failed, where one can."""
  if x.env_failed is None:
    return {}
  return {'rollout/env_failed': (x.env_failed > 0).sum(dtype=jnp.float32)}


def padding(mask_BP, mask_BT, group_size: int) -> metrics.Mean:
  """Share of padding in groups of a prompt and its completions, unpacked.

  Args:
    mask_BP: 1 on the tokens of prompts.
    mask_BT: 1 on those of completions.
    group_size: adjacent rows that share a prompt.
  """
  (B, P), T = mask_BP.shape, mask_BT.shape[1]
  prompt_N = mask_BP[::group_size].sum(1)
  real_N = mask_BT.reshape(-1, group_size * T).max(1)
  # The last token of a prompt is read with each completion.
  completed = packing.lengths(mask_BT).sum().astype(mask_BT.dtype)
  real = ((prompt_N - 1) * real_N).sum() + completed
  computed = jnp.full_like(real, B // group_size * P + B * T)
  return metrics.Mean(computed - real, computed)


def packed_padding(
  policy: base.Policy, group_size: int, informative_only: bool = False
) -> Callable:
  """Returns `minibatches -> info` with the share of padding in packed rows.

  It replaces the share that `describe` returns. Of a policy that does not pack,
  there is nothing to replace. A plan that cuts minibatches packs each piece
  apart; this is the share without cuts.

  Args:
    policy: the policy that scores the minibatches.
    group_size: adjacent rows that share a prompt.
    informative_only: as in `policy_stages.scorer`.
  """
  if policy.packed_tokens is None:
    return lambda batches: {}
  of = functools.partial(_padding_of_packed, policy.packed_tokens, group_size)

  def run(minibatches):
    return {'rollout/padding': of(minibatches)}

  stage = stages.Stage(run, 'padding', 'batch')

  def padding(batches):
    if not informative_only:
      return stage([(x.obs.mask, x.mask) for x, *_ in batches])
    return stage([(x.obs.mask, x.mask, x.advantage) for x, *_ in batches])

  return padding


def example_padding(policy: base.Policy, group_size: int = 1) -> Callable:
  """Returns `base.Example -> info` with the share of padding.

  Args:
    policy: the policy that scores the examples, in packed rows or unpacked.
    group_size: adjacent rows that share a prompt.
  """
  capacity = policy.packed_tokens

  def run(mask_BP, mask_BT):
    if capacity is None:
      return {'train/padding': padding(mask_BP, mask_BT, group_size)}
    batches = [(mask_BP, mask_BT)]
    return {'train/padding': _padding_of_packed(capacity, group_size, batches)}

  stage = stages.Stage(run, 'padding', 'batch')
  return lambda x: stage(x.prompt.mask, x.mask)


def _padding_of_packed(
  capacity: int, group_size: int, minibatches
) -> metrics.Mean:
  """Share of padding in packed rows of `capacity` tokens.

  Args:
    capacity: tokens that a row has room for.
    group_size: adjacent rows that share a prompt.
    minibatches: masks of prompts and of completions, of each minibatch, and
      advantages, if completions without one are left out.
  """

  def size(mask_BP, mask_BT, *advantage):
    if advantage:
      mask_BT = policy_stages.informative_mask(mask_BT, *advantage)
    lengths = mask_BP.shape[1], mask_BT.shape[1]
    shared = packing.sharing(group_size, *lengths)
    return packing.assign_batch(mask_BP, mask_BT, shared, capacity).size

  size_M = jnp.concatenate([size(*x) for x in minibatches])
  size_M = size_M.astype(jnp.float32)
  computed = capacity * (size_M > 0).sum(dtype=jnp.float32)
  return metrics.Mean(computed - size_M.sum(), computed)
