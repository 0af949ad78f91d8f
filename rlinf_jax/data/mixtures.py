"""The order of rows: by seed, epoch and difficulty, mixed by weights.

The order is one endless sequence, a function of the files and the seed alone. A
position in it is an integer for each file, so a checkpoint stores it and a
resumed run continues it.
"""

from collections.abc import Callable, Mapping, Sequence
import functools
import math
from typing import NamedTuple

import numpy as np

from stages import source_files


def paths(given: str | Sequence[str], name: str) -> list[str]:
  """The files of an argument that names one or several.

  Raises:
    ValueError: if no file is given.
  """
  files = [given] if isinstance(given, str) else list(given)
  if not files:
    raise ValueError(f'No file is given for {name!r}: name one.')
  return files


def shares(train, sizes: Sequence[int]) -> list[float]:
  """The weight of each file in a mixture: as given, or its number of rows.

  Raises:
    ValueError: for a weight that is not above zero, or infinite.
  """
  if not isinstance(train, Mapping):
    return [float(size) for size in sizes]
  wrong = {name: x for name, x in train.items() if not 0 < x < math.inf}
  if wrong:
    raise ValueError(
      f'The weights {wrong} of files are not finite numbers above zero: leave '
      'out a file that is not to be used.'
    )
  return [float(x) for x in train.values()]


def init(
  train: source_files.Files, held_out: source_files.Files
) -> Callable[[int], dict[str, np.ndarray]]:
  """Returns the function from a seed to the state before the first batch.

  Args:
    train: the files that are mixed.
    held_out: those to evaluate on.
  """

  def init(seed):
    return {
      'seed': np.array(seed),
      'batch': np.array(0),
      'position': np.zeros(len(train.paths), np.int64),
      **source_files.entries(train, held_out),
    }

  return init


@functools.lru_cache(maxsize=64)
def permutation(seed: int, part: int, epoch: int, rows: int) -> np.ndarray:
  """A random order of a file's rows in an epoch."""
  return np.random.default_rng([seed, part, epoch]).permutation(rows)


class Mixture(NamedTuple):
  """Files of rows, and how they are mixed.

  Attributes:
    sizes: number of rows of each file.
    weights: share of each file, in any unit.
    difficulty: a number for every row, file after file. The first epoch of each
      file is then in ascending order of it, and random among equals. None if
      every epoch is in random order.
  """

  sizes: Sequence[int]
  weights: Sequence[float]
  difficulty: np.ndarray | None = None

  def order(self, seed: int, part: int, epoch: int) -> np.ndarray:
    """Indices of a file's rows in an epoch, counted file after file."""
    start = sum(self.sizes[:part])
    rows = start + permutation(seed, part, epoch, self.sizes[part])
    if epoch == 0 and self.difficulty is not None:
      rows = rows[np.argsort(self.difficulty[rows], kind='stable')]
    return rows


def take(
  seed: int, position: np.ndarray, mixture: Mixture, n: int
) -> tuple[np.ndarray, np.ndarray]:
  """The next `n` rows of a mixture of files.

  The next row comes from the file that is furthest behind its share, so that
  shares hold at every moment. Within a file, an epoch gives every row once.

  Args:
    seed: seed of the order.
    position: number of rows taken from each file so far.
    mixture: the files.
    n: number of rows to take.

  Returns:
    The position afterward, and the indices of the rows, counted file after
    file.
  """
  shares = np.asarray(mixture.weights, float) / np.sum(mixture.weights)
  position = position.copy()
  taken, orders = np.zeros(n, np.int64), {}
  for i in range(n):
    part = int(np.argmax(shares * (position.sum() + 1) - position))
    epoch, index = divmod(int(position[part]), mixture.sizes[part])
    if (part, epoch) not in orders:
      orders[part, epoch] = mixture.order(seed, part, epoch)
    taken[i] = orders[part, epoch][index]
    position[part] += 1
  return position, taken


def batches_by_length(
  rng: np.random.Generator, rows: np.ndarray, length: np.ndarray, size: int
) -> np.ndarray:
  """Cuts rows into batches of similar length, the longest first.

  The order of the others is random. A plan is made for the first batch of a
  run, so the first batch must be the one that needs the most memory.

  Where rows span two epochs, second occurrences of rows are sorted apart, so
  that at most one batch holds a row twice.

  Args:
    rng: generator of the order.
    rows: indices of rows; their number is a multiple of `size`.
    length: the length in tokens of every row.
    size: rows a batch.
  """
  # Stable, so that equal lengths keep the order of the mixture.
  batches = rows[np.lexsort((length[rows], _copies(rows)))].reshape(-1, size)
  first = length[batches].max(1).argmax()
  others = np.delete(batches, first, axis=0)
  return np.concatenate([batches[first : first + 1], rng.permutation(others)])


def _copies(rows: np.ndarray) -> np.ndarray:
  """The number of earlier occurrences of each row, among the rows."""
  order = np.argsort(rows, kind='stable')
  _, start, counts = np.unique(
    rows[order], return_index=True, return_counts=True
  )
  copies = np.empty(len(rows), int)
  copies[order] = np.arange(len(rows)) - np.repeat(start, counts)
  return copies
