"""Types of rewards."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from rlinf_jax.config import suggestions


class Columns(dict[str, Any]):
  """Values of a row of a file, by the names of their columns.

  Raises:
    KeyError: for a column that does not travel with the row.
  """

  def __missing__(self, name: str):
    found = suggestions.join_names(self) or 'none'
    raise KeyError(
      f'A reward reads the column {name!r}, and the columns that rewards see '
      f'are {found}: name it in `columns` of `questions.questions` (COLUMNS in '
      'gin)'
    )


class Completion(NamedTuple):
  """A completion to reward.

  Attributes:
    text: its text, without the end token.
    question: the question that it answers; of a conversation, the last message.
    answer: the answer that the data has.
    tokens: its length, the end token included.
    limit: the most tokens that it could have had.
    columns: further columns of its row, those that `columns` of
      `questions.questions` names, as values of JSON.
  """

  text: str
  question: str
  answer: str
  tokens: int
  limit: int
  columns: Columns = Columns()

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
