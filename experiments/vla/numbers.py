"""A vocabulary for the state of a small π0.5, without a tokenizer."""

import numpy as np

from stages.vla import instructions

BINS = 257  # Of a number of −1 … 1, and one for what is below.


def state_tokens(first: int = 4) -> instructions.StateTokens:
  """One token for each bin, from `first` on, and one more for the end."""
  number_NP = first + np.arange(BINS, dtype=np.int32)[:, None]
  end = np.array([first + BINS], np.int32)
  return instructions.StateTokens(number_NP, np.ones_like(number_NP), end)
