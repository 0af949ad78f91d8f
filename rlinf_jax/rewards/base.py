"""Types of rewards."""

from collections.abc import Callable, Sequence
from typing import NamedTuple


class Completion(NamedTuple):
  """A completion to reward.

  Attributes:
    text: its text, without the end token.
    question: the question that it answers; of a conversation, the last message.
    answer: the answer that the data has.
    tokens: its length, the end token included.
    limit: the most tokens that it could have had.
  """

  text: str
  question: str
  answer: str
  tokens: int
  limit: int

  @property
  def truncated(self) -> bool:
    """Whether it may have been cut off: it has as many tokens as it may."""
    return self.tokens >= self.limit


Reward = Callable[[Completion], float]


class Batched(NamedTuple):
  """A reward that takes many completions at once.

  Attributes:
    name: in metrics.
    score: `completions -> rewards`, one each; NaN where it failed.
  """

  name: str
  score: Callable[[Sequence[Completion]], Sequence[float]]
