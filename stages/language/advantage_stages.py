"""Stages from rewards of completions to advantages of their tokens."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

import stages
from stages import base
from stages.language import policy_stages, verifiers
from stages.learn import (
  advantages,
  losses,
  objectives,
  rollout_correction,
  signatures,
  turn_advantages,
)


def estimator(
  advantage: signatures.GroupAdvantage,
  group_size: int,
  *,
  kl_coef: float = 0.0,
  kl_to_go: bool = False,
  normalize: bool = False,
  mask_truncated: bool = False,
  turn_advantage: signatures.TurnAdvantage | None = None,
) -> Callable:
  """Returns `experience, reward_B, ref_logp_BT, turns=None -> advantage_BT`.

    Aᵢₜ = A(R − β Σₛ k1ₛ)ᵢ,   or with `kl_to_go`   Aᵢₜ = A(R)ᵢ − β Σₛ≥ₜ k1ᵢₛ

  A is a function of the rewards of a group, and k1 = lp − lp_ref, where lp is
  the log-probability before the update. With `turn_advantage`, A(R) is the
  advantage of the turn that a token belongs to, and what R has beyond the
  rewards of the `turns` belongs to the last. Advantages are 0 on padding.

  A row without a token of the policy's, such as that of an environment that
  failed or of a role that had no turn, is compared as if its reward were the
  mean of the others of its group, so that it moves no baseline.

  Args:
    advantage: A, `reward_G -> advantage_G` of one group.
    group_size: completions of each prompt.
    kl_coef: β; if it is 0, no reference is read.
    kl_to_go: whether a token's penalty is the sum of its own k1 and those of
      the tokens after it, as in REINFORCE++, rather than of the whole
      completion.
    normalize: whether advantages are whitened over all tokens of the batch,
      which is a barrier.
    mask_truncated: whether whitening leaves out completions that reached the
      length limit, as the loss then does; their advantages become 0.
    turn_advantage: advantages of turns, in place of `advantage`.
  """

  @stages.stage('group_advantage', group_size=group_size)
  def group_advantage(reward_B, turns, mask_BT, *logps):
    if kl_coef:
      logp_BT, ref_logp_BT = logps
      kl_BT = jnp.where(mask_BT > 0, losses.kl_k1(logp_BT, ref_logp_BT), 0.0)
      if not kl_to_go:
        reward_B -= kl_coef * kl_BT.sum(1)
    if turn_advantage is None:
      filled_NG = jax.vmap(advantages.fill_rewards)(
        reward_B.reshape(-1, group_size),
        mask_BT.max(1).reshape(-1, group_size),
      )
      advantage_BT = jax.vmap(advantage)(filled_NG).reshape(-1, 1)
    else:
      advantage_BT = _by_turn(
        turn_advantage, group_size, reward_B, turns, mask_BT
      )
    # Rewards of padding rows are arbitrary.
    advantage_BT = jnp.where(mask_BT > 0, advantage_BT, 0.0)
    if kl_coef and kl_to_go:
      to_go_BT = jax.vmap(advantages.reward_to_go)(-kl_coef * kl_BT)
      advantage_BT += jnp.where(mask_BT > 0, to_go_BT, 0.0)
    return advantage_BT

  whiten = stages.Stage(advantages.whiten, 'whiten', 'batch')
  if mask_truncated:
    whiten = stages.Stage(_whiten_finished, 'whiten', 'batch')

  def estimate(
    x: base.Experience, reward_B, ref_logp_BT, turns: base.Turns | None = None
  ):
    logps = (rollout_correction.old_logp(x), ref_logp_BT) if kl_coef else ()
    turns = () if turn_advantage is None else _known(turns)
    advantage_BT = group_advantage(reward_B, turns, x.mask, *logps)
    if not normalize:
      return advantage_BT
    truncated = (x.truncated,) if mask_truncated else ()
    return whiten(advantage_BT, x.mask, *truncated)

  return estimate


def _known(turns: base.Turns | None) -> base.Turns:
  if turns is None:
    raise ValueError(
      'turn_advantage needs the rewards of turns, and this verifier gives one '
      'reward for the whole completion: use conversation.episode_return with '
      'rollouts that converse, or leave turn_advantage out.'
    )
  return turns


def _by_turn(
  advantage: signatures.TurnAdvantage,
  group_size: int,
  reward_B,
  turns: base.Turns,
  mask_BT,
):
  """The advantage of the turn that each token belongs to, [B, T]."""
  reward_BK, taken_BK = jax.vmap(turn_advantages.of_turns)(
    turns.reward, reward_B, mask_BT
  )

  def of_group(reward_GK, taken_GK, state_GK):
    # `advantage` may compare whole rows, by their sums.
    return_G = advantages.fill_rewards(reward_GK.sum(1), taken_GK[:, 0])
    first_G = jnp.where(taken_GK[:, 0] > 0, reward_GK[:, 0], return_G)
    return advantage(reward_GK.at[:, 0].set(first_G), taken_GK, state_GK)

  groups = (
    x.reshape(-1, group_size, x.shape[1])
    for x in (reward_BK, taken_BK, turns.state)
  )
  advantage_BK = jax.vmap(of_group)(*groups).reshape(reward_BK.shape)
  turn_BT = jax.vmap(turn_advantages.turn_of_token)(mask_BT)
  return jnp.take_along_axis(advantage_BK, turn_BT, 1)


def _whiten_finished(advantage_BT, mask_BT, truncated_B):
  return advantages.whiten(
    advantage_BT, objectives.finished_mask(mask_BT, truncated_B)
  )


def above_greedy(
  policy: base.Policy,
  verify: stages.Stage | verifiers.LearnedVerifier,
  group_size: int,
) -> Callable:
  """Returns `verdict, Version, problem, key, params=() -> verdict`.

  Subtracts ReMax's baseline from rewards; `params` are those of a learned
  verifier.

    R − R(greedy completion of the same prompt),   arXiv:2310.10505 eq. 6

  Args:
    policy: the language model that is trained.
    verify: as in `grpo`.
    group_size: sampled completions of each prompt of `problem`.
  """
  policy = policy._replace(replays_routing=False)  # Nothing is trained on it.
  complete = policy_stages.act(policy, 'greedy', greedy=True)
  repeat = policy_stages.repeat(group_size)
  subtract = stages.Stage(
    lambda reward_B, greedy_B: reward_B - greedy_B, 'above_greedy'
  )

  def subtract_greedy(verdict, actor: base.Version, problem, key, params=()):
    keys = stages.keys(key, problem.prompt)  # Greedy decoding draws nothing.
    x = complete(actor, problem.prompt, keys)
    greedy = verifiers.judge(verify, params, problem.answer, x)
    reward_B = subtract(verdict.reward, repeat(greedy.reward))
    return verdict._replace(reward=reward_B)

  return subtract_greedy
