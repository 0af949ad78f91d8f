"""Actions as tokens, and their statistics in a data set, as OpenVLA has them.

A normalized action, −1 … 1 in each dimension, falls into one of `bins` bins,
whose tokens are the last of the vocabulary in reverse order. A data set's
quantiles q01 and q99 are −1 and 1 of a dimension.
"""

from collections.abc import Callable, Mapping
import dataclasses
import functools
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float
import numpy as np

EPSILON = 1e-8  # Of the width of a dimension, when it is normalized.


class ActionStats(NamedTuple):
  """Statistics of the actions of a data set, one number a dimension.

  Attributes:
    q01: 1 % of actions are lower.
    q99: 1 % of actions are higher.
    mask: false on dimensions that are not normalized, such as a gripper's.
  """

  q01: Float[Array, ' A']
  q99: Float[Array, ' A']
  mask: Bool[Array, ' A']


def action_stats(
  norm_stats: Any,
  key: str | None = None,
  part: Literal['action', 'proprio'] = 'action',
) -> ActionStats:
  """Statistics of a data set that a model was trained on.

  Args:
    norm_stats: data sets by name: `norm_stats` of OpenVLA's config.json, or the
      content of dataset_statistics.json.
    key: name of the data set; None if there is but one.
    part: 'proprio' for those of the robot's state.

  Raises:
    ValueError: if there is no such data set, or its statistics are incomplete.
  """
  if not isinstance(norm_stats, Mapping) or not norm_stats:
    raise ValueError(
      'The model has no statistics of actions: give those of its '
      'dataset_statistics.json.'
    )
  known = ', '.join(sorted(map(str, norm_stats)))
  if key is None and len(norm_stats) > 1:
    raise ValueError(
      f'The model was trained on several data sets ({known}): name the one '
      'whose actions it shall take.'
    )
  key = next(iter(norm_stats)) if key is None else key
  if key not in norm_stats:
    raise ValueError(
      f'The model has no statistics of {key!r}, but of {known}: name one of '
      'these.'
    )
  return _checked(norm_stats[key], key, part)


def _checked(entry: Any, key: str, part: str) -> ActionStats:
  """The statistics of one data set, which came from strangers."""
  raw = entry.get(part) if isinstance(entry, Mapping) else None
  raw = raw if isinstance(raw, Mapping) else {}
  try:
    low, high = (
      np.asarray(raw.get(name, ()), np.float32) for name in ('q01', 'q99')
    )
    mask = np.asarray(raw.get('mask', np.ones(low.shape, bool)))
  except (TypeError, ValueError) as error:
    raise ValueError(
      f'The statistics of {key!r} are not lists of numbers ({error}).'
    ) from error
  if not (
    low.ndim == 1
    and low.size
    and low.shape == high.shape == mask.shape
    and mask.dtype == bool
    and np.isfinite([low, high]).all()
  ):
    raise ValueError(
      f'The statistics of {key!r} need `{part}` with `q01`, `q99` and '
      f'optionally `mask`, finite and of one length; they have {raw!r:.200}.'
    )
  return ActionStats(low, high, mask)


def normalize(stats: ActionStats, action):
  """2 (a − q01) / (q99 − q01) − 1, clipped to ±1; other dimensions as they are.

  A dimension that never changes is 0.
  """
  low, high, mask = (_leading(x, action) for x in stats)
  scaled = 2.0 * (action - low) / (high - low + EPSILON) - 1.0
  scaled = jnp.where(high == low, 0.0, jnp.clip(scaled, -1.0, 1.0))
  return jnp.where(mask, scaled, action)


def normalizer(norm_stats: Any, key: str | None = None) -> Callable:
  """Returns `actions -> actions` that are −1 … 1; see `action_stats`."""
  return functools.partial(normalize, action_stats(norm_stats, key))


def unnormalize(stats: ActionStats, action):
  """½ (a + 1) (q99 − q01) + q01; other dimensions as they are."""
  low, high, mask = (_leading(x, action) for x in stats)
  return jnp.where(mask, 0.5 * (action + 1.0) * (high - low) + low, action)


@dataclasses.dataclass(frozen=True)
class ActionTokens:
  """The tokens of actions.

  Attributes:
    end: id after the last token, which is that of the lowest bin: the size of
      the vocabulary before it was padded.
    bins: number of tokens. Their values are `bins` − 1 centers: the first two
      tokens have the same one.
  """

  end: int
  bins: int = 256

  def __post_init__(self):
    if not 2 <= self.bins <= self.end:
      raise ValueError(
        f'{self.bins} bins need as many tokens, and 2 or more; the vocabulary '
        f'has {self.end}.'
      )

  @property
  def start(self) -> int:
    """Id of the first token, which is that of the highest bin."""
    return self.end - self.bins

  def encode(self, action):
    """Tokens of normalized actions."""
    edges = jnp.asarray(np.linspace(-1.0, 1.0, self.bins), action.dtype)
    clipped = jnp.clip(action, -1.0, 1.0)
    bin_ = jnp.digitize(clipped, edges)
    return (self.end - bin_).astype(jnp.int32)

  def decode(self, token):
    """Normalized actions of tokens: the centers of their bins."""
    edges = np.linspace(-1.0, 1.0, self.bins)
    centers = jnp.asarray((edges[:-1] + edges[1:]) / 2.0, float)
    return centers[jnp.clip(self.end - token - 1, 0, self.bins - 2)]


def _leading(x_A, like):
  """A vector in the rank of `like`."""
  return jnp.asarray(x_A).reshape((1,) * (like.ndim - 1) + (-1,))
