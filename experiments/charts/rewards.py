"""The reward of an answer that is a digit."""

from rlinf_jax.rewards import base


def same_digit(completion: base.Completion) -> float:
  """1 for the text of the answer, which needs no mathematics to compare."""
  return float(completion.text.strip() == completion.answer)
