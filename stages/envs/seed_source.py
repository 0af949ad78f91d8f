"""Where an embodied workflow's batches come from: there is nothing to ask.

Environments carry their own luck, so a training batch is empty. What is held
out are seeds, each of one episode.
"""

import numpy as np

from stages import base

# Training draws its seeds at random: few of them, if any, are held out.
FIRST = 2**30


def seeds(*, held_out: int = 100, held_out_batch: int = 100) -> base.Source:
  """Empty batches, and the same held-out seeds for every run.

  Args:
    held_out: episodes of an evaluation.
    held_out_batch: how many of them go on at once.
  """
  if held_out % held_out_batch:
    raise ValueError(
      f'{held_out} held-out seeds cannot be tried in batches of '
      f'{held_out_batch}: make one a multiple of the other.'
    )

  def held():
    seed = FIRST + np.arange(held_out, dtype=np.int32)
    return np.split(seed, held_out // held_out_batch)

  return base.Source(
    lambda seed: {'seed': np.array(seed)},
    lambda state, metrics: (state, ()),
    held,
  )
