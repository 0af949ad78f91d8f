"""Settings of the terms of a policy's loss, for the objectives of workflows."""

from typing import NamedTuple

from stages.learn import losses, signatures


class Clip(NamedTuple):
  """The range of the ratio ρ in the clipped surrogate, `losses.ppo_clip`.

  Attributes:
    low: how far the ratio may fall below 1.
    high: how far it may rise above 1.
    dual: bound of the loss where the advantage is negative; None without one.
  """

  low: float = 0.2
  high: float = 0.2
  dual: float | None = None


class KlPenalty(NamedTuple):
  """The KL divergence from a reference policy, added to the loss.

  Attributes:
    coef: its weight β; 0 without it.
    estimator: of the divergence of each token.
  """

  coef: float = 0.0
  estimator: signatures.KlEstimator = losses.kl_k3


class Importance(NamedTuple):
  """The weight of tokens that another policy sampled, and its bound.

  Attributes:
    weight: of each token, from the log-probabilities of both policies; None
      where no log-probabilities of the other policy are given.
    bound: of the weights.
    cap: the number that `bound` takes.
  """

  weight: signatures.ImportanceWeight | None = losses.token_weight
  bound: signatures.ImportanceBound = losses.truncated
  cap: float = 2.0


class ValueLoss(NamedTuple):
  """The loss of a critic: squared errors, unless `clip` or `huber` is given.

  Attributes:
    coef: its weight.
    clip: how far a value may move from the recorded one; None for any distance.
    huber: the error beyond which the loss is linear; None for none.
  """

  coef: float = 0.5
  clip: float | None = None
  huber: float | None = None


def check(clip: Clip, importance: Importance):
  """Refuses bounds that would silence all tokens of one kind.

  Raises:
    ValueError: for a dual clip or a cap of weights that excludes a ratio of 1,
      that of a policy that has not changed.
  """
  if clip.dual is not None and clip.dual <= 1.0:
    raise ValueError(
      f'dual_clip = {clip.dual} would cut the gradient of all tokens with a '
      'negative advantage: set it above 1, such as 3.0, or leave it out.'
    )
  if importance.cap < 1.0:
    raise ValueError(
      f'importance_cap = {importance.cap} is below the weight of tokens that '
      'the policy itself sampled, 1: set it to 1 or more, such as 2.0.'
    )


def needs_reference(
  kl_coef: float, kl_reward_coef: float, kl_to_go: bool = False
) -> bool:
  """Whether a KL needs a reference.

  Raises:
    ValueError: for a term and a penalty at once, or a penalty without a weight.
  """
  if kl_coef and kl_reward_coef:
    raise ValueError(
      f'kl_coef is {kl_coef} and kl_reward_coef is {kl_reward_coef}, which '
      'would count the distance from the reference twice, in the loss and in '
      'the reward: set one of them to 0.'
    )
  if kl_to_go and not kl_reward_coef:
    raise ValueError(
      'kl_to_go distributes the penalty of kl_reward_coef, which is 0: set '
      'kl_reward_coef, or leave kl_to_go out.'
    )
  return bool(kl_coef or kl_reward_coef)
