"""Random steps of episodes on disk, with few episodes in memory at a time.

An epoch takes the episodes in random order and joins neighbors to windows. The
steps of a window are read together and shuffled, and a thread reads the next
window meanwhile. Which step comes when follows from the seed alone, so a run
that resumes reads the same ones.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
import functools
import itertools
from typing import Any, NamedTuple

import jax
import numpy as np


class Piece(NamedTuple):
  """Rows of a batch that come from one window.

  Attributes:
    window: the episodes of the window, in order.
    rows: numbers of its steps.
  """

  window: tuple[int, ...]
  rows: np.ndarray


class Windows:
  """Reads windows, and keeps those that the current and the next batch need.

  At most two windows are in memory where a batch is smaller than a window.
  """

  def __init__(
    self,
    lengths: Sequence[int],
    most_rows: int,
    load: Callable[[tuple[int, ...]], Any],
  ):
    """Takes the episodes to read.

    Args:
      lengths: steps of each episode.
      most_rows: most steps of a window; a longer episode is one by itself.
      load: `episodes -> tree` of arrays with their steps one after the other.
    """
    self._lengths = np.asarray(lengths)
    self._most_rows = most_rows
    self._load = load
    self._thread = futures.ThreadPoolExecutor(1, 'episodes')
    self._held: dict[tuple[int, ...], futures.Future] = {}
    # Batches are of one epoch or two; an epoch of a million takes seconds.
    self._epoch = functools.lru_cache(2)(self._make_epoch)

  @property
  def rows(self) -> int:
    """Steps of an epoch."""
    return int(self._lengths.sum())

  def take(self, seed: int, start: int, count: int) -> Any:
    """A tree of the arrays of `count` steps, from position `start` on."""
    pieces = [*self._pieces(seed, start, count)]
    ahead = next(self._pieces(seed, start + count, 1))
    needed = {piece.window for piece in pieces}
    for window in {*self._held} - needed - {ahead.window}:
      self._held.pop(window).cancel()
    found = []
    for piece in pieces:
      data = self._submit(piece.window).result()
      found.append(jax.tree.map(lambda x, rows=piece.rows: x[rows], data))
    self._submit(ahead.window)
    return jax.tree.map(lambda *xs: np.concatenate(xs), *found)

  def _submit(self, window: tuple[int, ...]) -> futures.Future:
    if window not in self._held:
      self._held[window] = self._thread.submit(self._load, window)
    return self._held[window]

  def _pieces(self, seed: int, start: int, count: int) -> Iterator[Piece]:
    """Yields the windows of a batch, with the rows to take from each."""
    first, offset = divmod(start, self.rows)
    for epoch in itertools.count(first):
      windows, starts = self._epoch(seed, epoch)
      first_window = int(np.searchsorted(starts, offset, side='right')) - 1
      offset -= starts[first_window]
      for n in range(first_window, len(windows)):
        rng = np.random.default_rng([seed, epoch, n])
        order = rng.permutation(starts[n + 1] - starts[n])
        rows = order[offset : offset + count]
        yield Piece(windows[n], rows)
        offset, count = 0, count - len(rows)
        if not count:
          return

  def _make_epoch(
    self, seed: int, epoch: int
  ) -> tuple[list[tuple[int, ...]], np.ndarray]:
    """The windows of an epoch; the same episodes are the same window.

    Returns:
      The windows, and the step at which each begins, with the end as the last.
    """
    order = np.random.default_rng([seed, epoch]).permutation(len(self._lengths))
    windows, rows = [], 0
    for i in order.tolist():
      rows += self._lengths[i]
      if not windows or rows > self._most_rows:
        windows.append([])
        rows = self._lengths[i]
      windows[-1].append(i)
    sizes = [int(self._lengths[window].sum()) for window in windows]
    starts = np.concatenate([[0], np.cumsum(sizes)])
    return [tuple(sorted(window)) for window in windows], starts
