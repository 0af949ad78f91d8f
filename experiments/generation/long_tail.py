"""A model whose completions have a long tail of lengths, without training.

The vocabulary has eight classes of tokens. Embeddings of a class have one
direction, which dominates the residual stream, and the embedding is also the
output layer: the next token is of the class of the latest one, or the end
token, with the probability of that class. So the length of a completion is a
mixture of geometric distributions, by the class of the last token of its
prompt. The means of classes are quantiles of a log-normal distribution, whose
spread is chosen such that the 95th percentile is eight times the median. The
layers are random and small; their arithmetic is that of any model of this size.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import scipy.stats

from stages import base
from stages.models import transformer

CLASSES = 8
STOP = 0  # The end token.
SHARPNESS = 14.0  # Logit of the tokens of the latest token's class.
RATIO = 8  # Of the 95th percentile to the median.

SIZES = {
  '3.5M': transformer.Config(V=2048, D=256, L=4, H=4, K=2, W=64, F=704),
  '25M': transformer.Config(V=2048, D=512, L=8, H=8, K=4, W=64, F=1408),
}


def class_means(median: float) -> np.ndarray:
  """Mean lengths of the classes, for a median over all completions."""
  normal = scipy.stats.norm.ppf((np.arange(CLASSES) + 0.5) / CLASSES)

  def quantile(means, share):
    # Of a mixture of geometric distributions, by bisection.
    low, high = 0.0, 100 * means.max()
    for _ in range(60):
      n = (low + high) / 2
      ended = 1 - np.exp(n * np.log1p(-1 / means)).mean()
      low, high = (n, high) if ended < share else (low, n)
    return high

  means, spread, scale = None, 0.0, median
  for _ in range(200):
    means = 1.01 + scale * np.exp(spread * normal)
    middle = quantile(means, 0.5)
    scale *= (median / middle) ** 0.5
    spread += 0.1 * np.log(RATIO / (quantile(means, 0.95) / middle))
    spread = max(spread, 0.0)
  return means


def class_of(token):
  """The class of a token; the end token has none."""
  return (token - 1) % CLASSES


def params(config: transformer.Config, median: float) -> base.Params:
  """Parameters of the model."""
  rng = np.random.default_rng(0)
  drawn = transformer.init_params(
    dataclasses.replace(config, init_stddev=0.002), jax.random.key(0)
  )
  # Orthogonal directions of the classes, of unit mean square.
  direction, _ = np.linalg.qr(rng.normal(size=(config.D, CLASSES)))
  direction = direction.T * config.D**0.5
  token = np.arange(config.V)
  embed = direction[class_of(token)]
  embed += 0.02 * rng.normal(size=embed.shape)
  count = np.bincount(class_of(token[1:]), minlength=CLASSES)
  stay = count * np.exp(SHARPNESS) + config.V - 1 - count
  stop_logit = np.log(stay / (class_means(median) - 1))
  embed[STOP] = stop_logit / SHARPNESS @ direction
  return drawn | {
    'embed_VD': jnp.asarray(embed, jnp.float32),
    'norm_D': jnp.full(config.D, SHARPNESS / config.D, jnp.float32),
  }


def prompts(
  config: transformer.Config, groups: int, group_size: int, length: int
) -> base.Prompt:
  """Random prompts; those of each class are equally many."""
  rng = np.random.default_rng(1)
  token = rng.integers(1, config.V, (groups, length))
  wanted = rng.permutation(np.arange(groups) % CLASSES)
  token[:, -1] = 1 + wanted + CLASSES * rng.integers(0, 100, groups)
  token = np.repeat(token, group_size, axis=0).astype(np.int32)
  return base.Prompt(jnp.asarray(token), jnp.ones(token.shape, jnp.int32))
