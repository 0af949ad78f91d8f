"""Instructions of random models, which need no tokenizer."""

from collections.abc import Sequence

import numpy as np

from stages import base, ranges

FIRST = 3  # Before it are the tokens of padding, of a text's begin and its end.


def prompts(
  tasks: Sequence[str], *, length: ranges.PositiveInt = 48
) -> base.Prompt:
  """Prompts with a token for each word, as many columns as published models.

  Args:
    tasks: what is to be done, one text a row.
    length: P, columns of a prompt, padded on the right.
  """
  words = sorted({word for task in tasks for word in task.split()})
  token_NP = np.zeros((len(tasks), length), np.int32)
  mask_NP = np.zeros_like(token_NP)
  for i, task in enumerate(tasks):
    row = [1, *(FIRST + words.index(word) for word in task.split())]
    token_NP[i, : len(row)] = row
    mask_NP[i, : len(row)] = 1
  return base.Prompt(token_NP, mask_NP)
