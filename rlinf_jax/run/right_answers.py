"""Right answers of sampled completions, found by the tokens of their prompts.

Samples of a step come without answers, and not in the order of its batch: a
workflow may leave groups out, or finish those of earlier steps.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlinf_jax.data import text_arrays
from stages import base


def texts(problems: Any) -> list[str] | None:
  """The answers of a batch, where they are texts."""
  if not _has_texts(problems):
    return None
  return text_arrays.unpack(problems.answer.answer)


def by_prompt(rows: base.Info, batches: Sequence[Any]) -> list[str | None]:
  """The right answer of each row of samples.

  Args:
    rows: by name, among them the tokens of prompts, 'prompt' [B, P], and their
      'prompt_mask'.
    batches: the batches that the prompts are of.

  Returns:
    For each row, a text; None where the answers of the batches are no texts, or
    its prompt is in none of them, or has several answers.
  """
  batches = [x for x in batches if _has_texts(x)]
  prompts = zip(rows['prompt'], rows['prompt_mask'], strict=True)
  return [_answer(token[mask > 0], batches) for token, mask in prompts]


def _has_texts(problems: Any) -> bool:
  answer = getattr(problems, 'answer', None)
  return isinstance(answer, text_arrays.Reference)


def _answer(prompt_P, batches: Sequence[base.Problem]) -> str | None:
  """The one answer that the problems with this prompt have, if it is one."""
  found = {text for x in batches for text in _answers(prompt_P, x)}
  return found.pop() if len(found) == 1 else None


def _answers(prompt_P, problems: base.Problem) -> list[str]:
  """The answers of the problems with this prompt."""
  token_BP = np.asarray(problems.prompt.token)
  is_real_BP = np.asarray(problems.prompt.mask) > 0
  as_long = np.flatnonzero(is_real_BP.sum(1) == len(prompt_P))
  real = token_BP[as_long][is_real_BP[as_long]].reshape(-1, len(prompt_P))
  same = as_long[(real == prompt_P).all(1)]
  return text_arrays.unpack(problems.answer.answer[same])
