"""Group relative policy optimisation, arXiv:2402.03300."""

from collections.abc import Callable
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

import stages
from stages import base, metrics
from stages.language import evaluate as evaluate_lib
from stages.language import partial_rollout, policy_stages
from stages.learn import advantages, losses, minibatches, train_step


class State(NamedTuple):
  """What a step of GRPO reads and rewrites.

  Attributes:
    actor: what learns.
    reference: what it began as; nothing where none is used.
    past: the actor before each of the last `lag` steps, the oldest first.
    rollout: completions on their way; nothing where steps finish their own.
  """

  actor: base.TrainState
  reference: base.Params
  past: tuple[base.Version, ...]
  rollout: partial_rollout.Rollout | tuple[()] = ()


def grpo(
  policy: base.Policy,
  verify: stages.Stage,
  optimizer: optax.GradientTransformation,
  *,
  group_size: int,
  clip_low: float = 0.2,
  clip_high: float = 0.2,
  dual_clip: float | None = None,
  kl_coef: float = 0.0,
  kl_estimator: Callable = losses.kl_k3,
  entropy_coef: float = 0.0,
  num_minibatches: int = 1,
  num_epochs: int = 1,
  minibatch_by: minibatches.MinibatchBy = 'row',
  staleness: int = 0,
  max_carry: int = 0,
  extra_groups: int = 0,
  advantage: Callable = advantages.group_relative,
  aggregate: Callable = losses.sequence_mean_token_mean,
  importance_cap: float = 2.0,
) -> base.Workflow:
  """Rewards each completion against the others of its prompt.

  Args:
    policy: the model to train.
    verify: `answer, action, mask -> base.Verdict`.
    optimizer: how gradients become updates.
    group_size: completions a prompt.
    clip_low: how far the probability ratio may fall.
    clip_high: how far it may rise; more than `clip_low` is DAPO's clip-higher.
    dual_clip: bound of the loss where the advantage is negative (dual clip).
    kl_coef: weight of the pull towards the policy it began as; 0 keeps no copy.
    kl_estimator: `logp, ref_logp -> KL`, token by token: how that is estimated.
      The gradient of `kl_k2` is that of KL(π‖π_ref), which lets go of what the
      reference did wrong; that of `kl_k3` is of KL(π_ref‖π), which does not.
    entropy_coef: weight of the entropy bonus.
    num_minibatches: minibatches of one batch, each an optimiser step.
    num_epochs: how often the batch is learned from, as PPO does: the clip is
      around the policy that acted.
    minibatch_by: of groups in minibatches: by 'row', 'shuffled' or by
      'arrival', as `dealing` says.
    staleness: steps by which the policy that acts is older than the one that
      learns. It is meaning, not speed: called with arrays it is obeyed too.
      What it buys is that a plan may generate while an earlier step still
      learns. The clip is then around the policy that acted.
    max_carry: steps for which a group may be carried that has not ended, to go
      on by newer parameters; 0 finishes all that is begun. As lag, it is
      meaning. The clip is then around the newest that acted, and every token is
      weighed.
    extra_groups: groups that are under way beside those that a step learns
      from.
    advantage: `reward_G -> advantage_G` of one group.
    aggregate: `loss_BT, mask_BT -> metrics.Mean`.
    importance_cap: the most that a token weighs for being likelier to the
      trainer than to who drew it (truncated importance sampling), where that is
      an engine which is not the trainer, or were several versions of the
      policy.
  """
  partial_rollout.check(policy, max_carry, extra_groups)
  loss = objective(
    functools.partial(policy.evaluate, group_size=group_size),
    (clip_low, clip_high, dual_clip),
    (kl_coef, kl_estimator),
    entropy_coef,
    aggregate,
    importance_cap,
  )
  measure = stages.Stage(
    functools.partial(
      describe, group_size=group_size, updates=num_minibatches * num_epochs
    ),
    'measure',
    'sum',
    unbatched=(2,),
    group_size=group_size,
  )
  deal = minibatches.minibatches(
    minibatch_by, num_minibatches, num_epochs, group_size
  )

  act = partial_rollout.act(policy, group_size, max_carry, extra_groups)
  recall = policy_stages.proximal_logp(
    policy, group_size, several=max_carry > 0
  )
  refer = policy_stages.logp(policy, 'ref_logp', group_size)

  @stages.stage('repeat', 'batch')
  def repeat(problem: base.Problem):
    return jax.tree.map(lambda x: jnp.repeat(x, group_size, axis=0), problem)

  @stages.stage('group_advantage', group_size=group_size)
  def compare(reward_B, mask_BT):
    advantage_NG = jax.vmap(advantage)(reward_B.reshape(-1, group_size))
    # What a verifier makes of nobody may be anything.
    return jnp.where(mask_BT > 0, advantage_NG.reshape(-1, 1), 0.0)

  gradient = stages.Stage(
    train_step.gradient(loss),
    'gradient',
    'sum',
    unbatched=(0,),
    group_size=group_size,
  )
  apply = stages.Stage(train_step.apply(optimizer), 'apply', 'batch')
  fold = stages.Stage(
    lambda *infos: functools.reduce(metrics.merge, infos), 'merge_info', 'batch'
  )
  examine = evaluate_lib.evaluate(policy, verify)

  def init(key):
    params = policy.init(key)
    actor = train_step.init(params, optimizer)
    past = (base.Version(params, actor.step),) * staleness
    return State(actor, params if kl_coef else (), past)

  def begin(state: State, problem: base.Problem):
    rollout = partial_rollout.allocate(
      policy, problem, group_size, extra_groups
    )
    return state._replace(rollout=rollout)

  def step(state: State, problem: base.Problem, key):
    asked = repeat(problem)
    keys = stages.keys(key, asked.prompt)
    actor = state.actor
    now = base.Version(actor.params, actor.step)
    older, *past = (*state.past, now)
    problem, x, rollout, told = act(older, state.rollout, asked, keys)
    x = recall(older, x)
    verdict = verify(problem.answer, x.action, x.mask)
    measured = measure(x, verdict, actor.step)
    x = x._replace(advantage=compare(verdict.reward, x.mask))
    ref_logp = refer(state.reference, x.obs, x.action) if kl_coef else ()
    infos = []
    for batch in deal(key, asked.prompt, x, ref_logp):
      actor, info = apply(actor, gradient(actor.params, *batch))
      infos.append(info)
    info = infos[0] if len(infos) == 1 else fold(*infos)
    state = State(actor, state.reference, tuple(past), rollout)
    return state, measured | told | info

  def evaluate(state: State, problem: base.Problem, key):
    now = base.Version(state.actor.params, state.actor.step)
    return examine(now, problem, key)

  return base.Workflow(
    *(init, step, evaluate, lambda state: state.actor.params, staleness),
    allocate=begin if max_carry else None,
  )


def objective(evaluate, clip, kl, entropy, aggregate, cap=2.0) -> Callable:
  """What `grpo` minimises: `params, experience, ref_logp -> means, info`.

  The clip is around the policy that acted, in the trainer's arithmetic. Where
  that is not the engine's, or where it was the last of several that acted,
  min(exp(lp_p − lp_b), C) weighs the difference.
  """
  kl, divergence = kl

  def loss(params, x: base.Experience, ref_logp_BT):
    now = evaluate(params, x.obs, x.action)
    # What a policy makes of padding may be anything, and ∞ · 0 is no number.
    now = now._replace(logp=jnp.where(x.mask > 0, now.logp, 0.0))
    old_BT = x.logp
    if x.proximal is not None:
      old_BT = jnp.where(x.mask > 0, x.proximal, 0.0)
    loss_BT = losses.ppo_clip(now.logp, old_BT, x.advantage, *clip)
    ratio_BT = losses.ratio(now.logp, old_BT)
    clipped_BT = losses.clip_fraction(now.logp, old_BT, x.advantage, *clip[:2])
    if x.proximal is not None:
      weight_BT = losses.token_weight(x.proximal, x.logp, x.mask)
      loss_BT *= losses.truncated(weight_BT, cap)
    kl_BT = losses.kl_k3(x.logp, now.logp)
    info = {
      'train/policy_loss': aggregate(loss_BT, x.mask),
      'train/kl_behavior': metrics.mean(kl_BT, x.mask),
      'train/clip_fraction': metrics.mean(clipped_BT, x.mask),
      'train/ratio_mean': metrics.mean(ratio_BT, x.mask),
      'train/ratio_max': metrics.maximum(ratio_BT, x.mask),
      # The exact one needs a pass over the vocabulary; its estimate does not.
      'train/entropy': metrics.mean(
        now.entropy if entropy else -x.logp, x.mask
      ),
    }
    if kl:
      ref_logp_BT = jnp.where(x.mask > 0, ref_logp_BT, 0.0)
      info['train/kl_reference'] = metrics.mean(
        losses.kl_k3(now.logp, ref_logp_BT), x.mask
      )
      loss_BT += kl * divergence(now.logp, ref_logp_BT)
    if entropy:
      loss_BT -= entropy * now.entropy
    return (aggregate(loss_BT, x.mask),), info

  return loss


def describe(
  x: base.Experience, verdict: base.Verdict, now, group_size: int, updates: int
):
  """What is worth knowing of a rollout, when the actor is at update `now`.

  A row without a token is padding, and nobody's.
  """
  here_B = x.mask.max(1)
  here_NG = here_B.reshape(-1, group_size)
  verdict = jax.tree.map(lambda x_B: jnp.where(here_B > 0, x_B, 0), verdict)
  reward_NG = verdict.reward.reshape(-1, group_size)
  alike_N = reward_NG.max(1) == reward_NG.min(1)
  length_B, T = x.mask.sum(1), x.mask.shape[1]
  stale_BT = (now - x.version).astype(jnp.float32) / updates  # In steps.
  stale_BT = jnp.where(x.mask > 0, stale_BT, 0.0)
  return _gap(x) | {
    'rollout/reward': metrics.moments(verdict.reward, here_B),
    'rollout/accuracy': metrics.mean(verdict.correct, here_B),
    'rollout/groups_degenerate': metrics.mean(
      alike_N.astype(jnp.float32), here_NG[:, 0]
    ),
    'rollout/response_length': metrics.histogram(length_B, T + 1, here_B),
    'rollout/truncated_fraction': metrics.mean(x.truncated, here_B),
    'rollout/staleness': metrics.mean(stale_BT, x.mask),
    'rollout/staleness_max': metrics.maximum(stale_BT),
    'rollout/tokens': length_B.sum(),
    'rollout/samples': metrics.first_rows(
      evaluate_lib.samples(x, verdict.reward), group_size
    ),
  }


def _gap(x: base.Experience):
  """How far the trainer is from whoever acted, in nats a token."""
  if x.proximal is None:
    return {}
  gap_BT = jnp.where(x.mask > 0, jnp.abs(x.proximal - x.logp), 0.0)
  return {
    'rollout/logprob_gap_mean': metrics.mean(gap_BT, x.mask),
    'rollout/logprob_gap_max': metrics.maximum(gap_BT),
  }
