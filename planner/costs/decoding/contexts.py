"""Counts the columns of keys and values that attention reads while decoding.

The context of a row is its prompt and the tokens that it has so far. A kernel
may read of each row its own context; a loop without a kernel may read of all
rows as many columns as the longest one has.
"""

from collections.abc import Sequence
import dataclasses
import math
from typing import Literal, NamedTuple

import numpy as np

from planner.costs.work import Work


class Contexts(NamedTuple):
  """The contexts of the active rows in some steps, between which none ends.

  Attributes:
    starts: the steps in which these rows started, in rising order.
    steps: numbers of the steps, [steps].
    prompt: tokens of a prompt.
  """

  starts: Sequence[int]
  steps: np.ndarray
  prompt: float = 0.0

  @property
  def mean(self) -> np.ndarray:
    """Mean of the rows' contexts, in each step."""
    return self.prompt + self.steps - sum(self.starts) / len(self.starts)

  @property
  def longest(self) -> np.ndarray:
    return self.prompt + self.steps - self.starts[0]

  @property
  def shortest(self) -> np.ndarray:
    return self.prompt + self.steps - self.starts[-1]

  def latest(self, most: float) -> np.ndarray:
    """Mean of the rows' contexts of which only the latest `most` count."""
    if math.isinf(most):
      return self.mean
    # Rows that started until then have as many columns, or more.
    last = self.prompt + self.steps - most
    count = np.searchsorted(self.starts, last, side='right')
    total = np.concatenate([[0], np.cumsum(self.starts)])[count]
    return self.mean - (count * last - total) / len(self.starts)


@dataclasses.dataclass(frozen=True)
class ColumnReads:
  """The work of attention that depends on the contexts of rows.

  Attributes:
    work: for each column of a row.
    of: what is read of each row: its own context, or as many columns as the
      longest context of all rows has, also for slots without a row.
    most: largest number of columns that is read of a row's own context.
    window: the latest tokens that a row attends to. Where `of` is 'longest',
      columns before those of all rows are not read.
  """

  work: Work
  of: Literal['own', 'longest'] = 'own'
  most: float = math.inf
  window: float = math.inf

  def columns(self, contexts: Contexts, empty: float = 0.0) -> np.ndarray:
    """Returns the columns of a row or slot, as a mean of all, in each step.

    Args:
      contexts: of the active rows.
      empty: the share of slots without a row.
    """
    if self.of == 'own':
      return contexts.latest(self.most) * (1 - empty)
    first = np.maximum(contexts.shortest - self.window, 0)
    return contexts.longest - first
