"""CPU-seconds a token to apply top-k and top-p to a large vocabulary.

  python -m experiments.sampling

Applies them as `stages.language.sample` does and by sorting the vocabulary, in
alternation, to the same random logits. CPU-seconds are of the whole process.
"""

import functools
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from stages.language import sample

ROWS, WORDS, ROUNDS = 64, 152_064, 5
SAMPLINGS = (
  sample.Sampling(top_k=50),
  sample.Sampling(top_p=0.95),
  sample.Sampling(top_k=50, top_p=0.95),
)


def sort(logit_BTV, sampling: sample.Sampling):
  """The same logits as `sample.shape`, by sorting each row."""
  ranked_BTV = jnp.sort(logit_BTV, axis=-1, descending=True)
  kept_BTV = jnp.ones(logit_BTV.shape, bool)
  if sampling.top_k:
    kept_BTV &= logit_BTV >= ranked_BTV[..., sampling.top_k - 1][..., None]
    inside = jnp.arange(WORDS)[None, None] < sampling.top_k
    ranked_BTV = jnp.where(inside, ranked_BTV, -jnp.inf)
  if sampling.top_p < 1.0:
    share_BTV = jax.nn.softmax(ranked_BTV, axis=-1)
    before_BTV = jnp.cumsum(share_BTV, axis=-1) - share_BTV
    n_BT = (before_BTV < sampling.top_p).sum(-1)
    least_BT1 = jnp.take_along_axis(ranked_BTV, n_BT[..., None] - 1, axis=-1)
    kept_BTV &= logit_BTV >= least_BT1
  return jnp.where(kept_BTV, logit_BTV, -jnp.inf)


def cpu_seconds(function, x) -> float:
  start = time.process_time()
  jax.block_until_ready(function(x))
  return time.process_time() - start


def main():
  rng = np.random.default_rng(0)
  logit_B1V = jnp.asarray(rng.normal(0, 3, (ROWS, 1, WORDS)), jnp.float32)
  print('| | sorted | searched | ratio | equal rows |')
  print('|---|---|---|---|---|')
  for sampling in SAMPLINGS:
    ways = [
      jax.jit(functools.partial(way, sampling=sampling))
      for way in (sort, sample.shape)
    ]
    got, want = (np.asarray(way(logit_B1V)) for way in ways)
    equal = (got == want).all(-1).sum()
    seconds = [
      [cpu_seconds(way, logit_B1V) for way in ways] for _ in range(ROUNDS)
    ]
    before, after = map(statistics.median, zip(*seconds, strict=True))
    print(
      f'| top_k={sampling.top_k}, top_p={sampling.top_p} '
      f'| {1e3 * before / ROWS:.1f} ms | {1e3 * after / ROWS:.1f} ms '
      f'| {before / after:.1f} | {equal} of {ROWS} |'
    )


if __name__ == '__main__':
  main()
