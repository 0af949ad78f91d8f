"""A source for workflows in environments: no data, and held-out seeds.

Environments draw their own randomness from seeds, so a training batch is empty.
An evaluation batch is a row of seeds, each of one episode.
"""

import numpy as np

from stages import base, ranges

# Training draws seeds from [0, 2³¹) at random, so few of these appear in it.
FIRST_HELD_OUT = 2**30


def seeds(
  *,
  held_out: ranges.HeldOut = 100,
  held_out_batch: ranges.PositiveInt = 100,
) -> base.Source:
  """Empty training batches, and the same held-out seeds for every run.

  Args:
    held_out: episodes of an evaluation.
    held_out_batch: episodes that run in parallel.

  Raises:
    ValueError: if `held_out` is no multiple of `held_out_batch`.
  """
  if held_out % held_out_batch:
    raise ValueError(
      f'{held_out} held-out seeds cannot be split into batches of '
      f'{held_out_batch}: make `held_out` a multiple of `held_out_batch`.'
    )

  def batches():
    seed = FIRST_HELD_OUT + np.arange(held_out, dtype=np.int32)
    return np.split(seed, held_out // held_out_batch)

  return base.Source(
    lambda seed: {'seed': np.array(seed)},
    lambda state, metrics: (state, ()),
    batches,
  )
