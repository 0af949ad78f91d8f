"""Group relative policy optimisation in worlds, arXiv:2402.03300.

Episodes that begin alike are compared with each other, as RLinf-VLA does
(arXiv:2510.06710): one advantage an episode, and nothing after its end.
"""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import stages
from stages import base, metrics
from stages.envs import episode_stats, obs_stats, rollout
from stages.envs import evaluate as evaluate_lib
from stages.envs import rollout as rollout_lib
from stages.learn import advantages, losses, minibatches, train_step
from stages.models import policy_file
from stages.workflows.grpo import objective


class State(NamedTuple):
  """What a step reads and rewrites: of environments nothing is left over.

  Attributes:
    actor: what learns.
    scale: moments of all that was seen; nothing where none are kept.
    reference: what it began as, parameters and scale; nothing where none is
      used.
  """

  actor: base.TrainState
  scale: Any
  reference: Any


def embodied_grpo(
  world: base.World,
  policy: Callable[[base.World], base.Policy],
  optimizer: optax.GradientTransformation,
  *,
  rows: int,
  group: int = 8,
  length: int | None = None,
  judge: Callable = episode_stats.succeeded,
  low: float = 0.2,
  high: float = 0.2,
  dual: float | None = None,
  kl: float = 0.0,
  divergence: Callable = losses.kl_k3,
  entropy: float = 0.0,
  updates: int = 1,
  epochs: int = 1,
  filtered: bool = False,
  advantage: Callable = advantages.group_relative,
  aggregate: Callable = losses.sequence_mean_token_mean,
  normalised: bool = True,
  model: str | None = None,
  examine: base.World | None = None,
) -> base.Workflow:
  """Makes one attempt in every environment, and compares those of a group.

  Args:
    world: to act in. Rows of a group are next to each other, and the seed that
      they share shall begin the same episode in all of their environments.
    policy: makes the policy to train from what a world shows and takes.
    optimizer: how gradients become updates.
    rows: environments.
    group: of them, those that begin alike.
    length: steps of an attempt; the most that an episode has if None.
    judge: `tally.Ended -> return_B`, what an episode was worth: whether it
      `tally.succeeded`, or what it `tally.returned`.
    low: how far the probability ratio may fall.
    high: how far it may rise.
    dual: limit of the loss where the advantage is negative; None for none.
    kl: weight of the pull towards the policy it began as; 0 keeps no copy.
    divergence: `logp, ref_logp -> KL`, step by step: how that is estimated.
    entropy: weight of the entropy bonus.
    updates: minibatches of a batch, each an optimiser step.
    epochs: how often a batch is learned from, in another order each time.
    filtered: masks groups of which all did equally well. Their advantage is
      zero in any case, but `kl` and `entropy` act on them, and they count
      where `aggregate` averages over steps.
    advantage: `return_G -> advantage_G` of one group.
    aggregate: `loss_BT, mask_BT -> metrics.Mean`.
    normalised: whether observations are put on a scale of their own.
    model: folder that a run has exported, to begin with its policy and its
      scale, which then stays as it is; None to begin from nothing.
    examine: the world in which the policy is judged; `world` if None, as no
      step needs what another has left there.
  """
  if rows % group:
    raise ValueError(
      f'{rows} environments are no whole groups of {group}: make `rows` a '
      'multiple of `group`.'
    )
  policy = policy(world)
  loss = objective(
    *(policy.evaluate, (low, high, dual), (kl, divergence)),
    *(entropy, aggregate),
  )
  draw = rollout_lib.seeds(rows // group, group)
  reset = rollout.reset(world)
  act = rollout.rollout(policy, world, length or world.horizon)
  contrast = stages.Stage(
    functools.partial(compare, group, judge, advantage, filtered),
    'compare',
    group=group,
  )
  measure = stages.Stage(
    functools.partial(describe, group, judge), 'measure', 'sum', group=group
  )

  def score(reference, obs, action):
    params, scale = reference
    obs = obs_stats.normalise(scale, obs)
    return policy.evaluate(params, obs, action).logp

  def scaled(params, scale, x: base.Experience, ref_logp):
    obs = obs_stats.normalise(scale, x.obs)
    return loss(params, x._replace(obs=obs), ref_logp)

  refer = stages.Stage(score, 'refer', whole=(0,))
  deal = minibatches.shuffle(updates, epochs, group)
  shuffled = minibatches.gather(group)
  gradient = stages.Stage(
    train_step.gradient(scaled), 'gradient', 'sum', whole=(0, 1)
  )
  apply = stages.Stage(train_step.apply(optimizer), 'apply', 'batch')
  fold = stages.Stage(
    lambda *infos: functools.reduce(metrics.merge, infos), 'fold', 'batch'
  )
  see = stages.Stage(lambda obs: obs_stats.of(obs, world.obs), 'see', 'sum')
  widen = stages.Stage(lambda a, b: a.merge(b), 'widen', 'batch')
  attempt = evaluate_lib.examine(policy, examine or world)

  def init(key):
    fresh = evaluate_lib.fresh(policy, world, normalised, key)
    begun = policy_file.start(model, fresh)
    params, scale = begun['policy'], begun['scale']
    reference = (params, scale) if kl else ()
    return State(train_step.init(params, optimizer), scale, reference)

  def step(state: State, batch, key):
    del batch  # All there is to know is in the environments.
    actor, scale = state.actor, state.scale
    seed = draw(key)
    place, obs = reset(seed)
    keys = stages.keys(key, seed)
    *_, x, outcome = act(actor.params, scale, place, obs, keys)
    outcome = outcome._replace(final_obs=())
    x = x._replace(**contrast(outcome), truncated=None)
    measured = measure(outcome)
    ref_logp = refer(state.reference, x.obs, x.action) if kl else ()
    infos = []
    for batch in shuffled(deal(key, seed), (x, ref_logp)):
      actor, info = apply(actor, gradient(actor.params, scale, *batch))
      infos.append(info)
    info = infos[0] if len(infos) == 1 else fold(*infos)
    if normalised and model is None:
      scale = widen(scale, see(x.obs))
    return State(actor, scale, state.reference), measured | info

  def evaluate(state: State, seed, key):
    return attempt(state.actor.params, state.scale, seed, key)

  return base.Workflow(
    init, step, evaluate, evaluate_lib.exported, score='eval/success_once'
  )


def compare(group, judge, advantage, filtered, outcome) -> dict[str, Any]:
  """Which steps count, and what they were worth: fields of the experience.

  Of an episode that a simulator has lost no step counts, and its group takes it
  to have gone as the others did on average.
  """
  return_NG, kept_NG, least_N1, most_N1 = _groups(group, judge, outcome)
  sum_N1 = (kept_NG * return_NG).sum(1, keepdims=True)
  count_N1 = kept_NG.sum(1, keepdims=True)
  # Not beyond what it is a mean of, or equals would differ by rounding.
  mean_N1 = jnp.clip(sum_N1 / jnp.maximum(count_N1, 1.0), least_N1, most_N1)
  advantage_NG = jax.vmap(advantage)(jnp.where(kept_NG > 0, return_NG, mean_N1))
  if filtered:
    kept_NG *= most_N1 > least_N1
  mask_BT = episode_stats.alive(outcome) * kept_NG.reshape(-1, 1)
  advantage_BT = jnp.where(mask_BT > 0, advantage_NG.reshape(-1, 1), 0.0)
  return {'mask': mask_BT, 'advantage': advantage_BT}


def describe(group, judge, outcome) -> base.Info:
  """What is worth knowing of attempts; steps are all that were made."""
  return_NG, kept_NG, least_N1, most_N1 = _groups(group, judge, outcome)
  steps = jnp.ones_like(outcome.reward)
  if outcome.steps is not None:
    steps = outcome.steps
  if outcome.lost is not None:
    steps = steps * (1.0 - outcome.lost)
  told = episode_stats.told(episode_stats.first(outcome), 'env')
  return (
    told
    | episode_stats.faults(outcome)
    | {
      'rollout/reward': metrics.moments(return_NG, kept_NG),
      'rollout/groups_degenerate': metrics.mean(
        (most_N1 <= least_N1)[:, 0].astype(return_NG.dtype), kept_NG.max(1)
      ),
      'env/steps': steps.sum(),
    }
  )


def _groups(group: int, judge, outcome):
  """Returns, which of them were not lost, and the least and most of those."""
  ended = episode_stats.first(outcome)
  return_NG = judge(ended).reshape(-1, group)
  kept_NG = ended.count.reshape(-1, group)
  least_N1 = jnp.where(kept_NG > 0, return_NG, jnp.inf).min(1, keepdims=True)
  most_N1 = jnp.where(kept_NG > 0, return_NG, -jnp.inf).max(1, keepdims=True)
  return return_NG, kept_NG, least_N1, most_N1
