"""Direct preference optimization, arXiv:2305.18290."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import optax

import stages
from stages import base, metrics, ranges
from stages.language import policy_stages, rollout_metrics
from stages.language.scoring import balance
from stages.learn import losses, objectives, train_step

PAIR = 2  # Adjacent rows: the preferred completion, then the rejected one.


class State(NamedTuple):
  """State carried from step to step.

  Attributes:
    actor: the policy being trained.
    reference: its initial parameters, without frozen ones.
  """

  actor: base.TrainState
  reference: base.Params


def dpo(
  policy: base.Policy,
  optimizer: optax.GradientTransformation,
  *,
  beta: ranges.PositiveFloat = 0.1,
  label_smoothing: ranges.Fraction = 0.0,
  balance_coef: ranges.NonNegativeFloat = 0.0,
) -> base.Workflow:
  """DPO: raises the probability of preferred over rejected completions.

    r = β (log π(y|x) − log π_ref(y|x)),   L = −log σ(r_chosen − r_rejected)

  y is a completion of the prompt x, π_ref the initial policy and σ the logistic
  function. A batch is a `base.Example` with a pair of completions in adjacent
  rows, the preferred one first. Evaluations compute the metrics of held-out
  pairs.

  Args:
    policy: the language model to train. It must sample from the whole
      distribution at temperature 1, the default, because `evaluate` scores
      under the distribution that is sampled from.
    optimizer: optimizer of the parameters.
    beta: β; a larger β keeps the policy closer to the reference.
    label_smoothing: as in `losses.preference`.
    balance_coef: weight of the loss that balances experts, a mean over the two
      completions of a pair; see `stages.language.scoring.balance`.

  Raises:
    ValueError: for a policy that samples from another distribution.
  """
  policy_stages.check_sampling(policy)
  balance.check(policy, balance_coef)
  loss = objective(policy, beta, label_smoothing, balance_coef)
  score_ref = stages.Stage(
    lambda params, x: completion_logp(policy, params, x),
    'ref_logp',
    unbatched=(0,),
    group_size=PAIR,
    rounds=policy.rounds,
  )
  score = stages.Stage(
    lambda params, x, ref_logp_B: _renamed(loss(params, x, ref_logp_B)),
    'score',
    'sum',
    unbatched=(0,),
    group_size=PAIR,
    rounds=policy.rounds,
  )
  learn = train_step.learner(loss, optimizer, group_size=PAIR)
  padding = rollout_metrics.example_padding(policy, PAIR)

  def init(key):
    actor = train_step.init(policy.init(key), optimizer)
    return State(actor, policy_stages.reference(policy, actor.params))

  def reference(state: State):
    return train_step.with_frozen(state.reference, state.actor.params)

  def step(state: State, pairs: base.Example, key):
    del key  # Nothing here is random.
    ref_logp_B = score_ref(reference(state), pairs)
    actor, info = learn(state.actor, [(pairs, ref_logp_B)])
    return state._replace(actor=actor), info | padding(pairs)

  def evaluate(state: State, pairs: base.Example, key):
    del key
    ref_logp_B = score_ref(reference(state), pairs)
    return score(state.actor.params, pairs, ref_logp_B)

  return base.Workflow(init, step, evaluate, lambda state: state.actor.params)


def completion_logp(policy: base.Policy, params, x: base.Example):
  """Log-probability of each completion, log π(y|x) = Σₜ mₜ lpₜ, [B]."""
  return _score(policy, params, x, has_balance=False)[0]


def _score(policy: base.Policy, params, x: base.Example, has_balance: bool):
  """The log-probability of each completion, and the scores of its tokens."""
  now = policy_stages.score(
    policy, params, x.prompt, x.action, x.mask, PAIR, has_balance
  )
  # Log-probabilities of padding are arbitrary, and ∞ · 0 is NaN.
  return jnp.where(x.mask > 0, now.logp, 0.0).sum(1), now


def pair_mean(x_BT, mask_BT) -> metrics.Mean:
  """Mean over real pairs of the means over their completions' tokens."""
  count_B = jnp.maximum(mask_BT.sum(1), 1.0)
  x_B = (x_BT * mask_BT).sum(1) / count_B
  return metrics.mean(x_B.reshape(-1, PAIR).mean(1), mask_BT.max(1)[::PAIR])


def objective(
  policy: base.Policy,
  beta: float,
  label_smoothing: float,
  balance_coef: float = 0.0,
) -> Callable:
  """Returns the loss `params, pairs, ref_logp_B -> Loss`.

  Pairs without a token are padding and do not count.
  """

  def loss(params, x: base.Example, ref_logp_B):
    logp_B, now = _score(policy, params, x, balance_coef > 0)
    chosen_N, rejected_N = (beta * (logp_B - ref_logp_B)).reshape(-1, PAIR).T
    margin_N = chosen_N - rejected_N
    real_N = x.mask.max(1)[::PAIR]
    logp_N2 = logp_B.reshape(-1, PAIR)
    mean = metrics.mean(losses.preference(margin_N, label_smoothing), real_N)
    term_BT, info = objectives.balance_term(
      balance_coef, now, x.mask, pair_mean
    )
    total = mean
    if balance_coef:
      total = mean._replace(sum=mean.sum + pair_mean(term_BT, x.mask).sum)
    info |= {
      'train/loss': mean,
      'train/accuracy': metrics.score((margin_N > 0) * 1.0, real_N),
      'train/reward_chosen': metrics.mean(chosen_N, real_N),
      'train/reward_rejected': metrics.mean(rejected_N, real_N),
      'train/reward_margin': metrics.mean(margin_N, real_N),
      'train/logp_chosen': metrics.mean(logp_N2[:, 0], real_N),
      'train/logp_rejected': metrics.mean(logp_N2[:, 1], real_N),
    }
    return train_step.Loss((total,), info)

  return loss


def _renamed(result: train_step.Loss) -> base.Info:
  """The metrics of a loss, with names that start with 'eval/'."""
  return {
    name.replace('train/', 'eval/'): metric
    for name, metric in result.info.items()
  }
