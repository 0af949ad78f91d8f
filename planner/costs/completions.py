"""How a batch of completions is finished: a process, not one stage.

Decoding takes a step for every token of the longest row, while rows end one by
one. How many are left at a time, and when the first groups are whole, decides
whether it pays to learn while others are still written.

Lengths are tokens of each row, those of a group adjacent; a step decodes one
token of every row that is under way and takes `step(batch, context)` seconds,
where `context` is the mean number of tokens that these rows look back on. Such
a function works on NumPy arrays of contexts.
"""

from collections.abc import Callable, Sequence
import dataclasses
import heapq
from typing import NamedTuple

import numpy as np

Step = Callable[[int, np.ndarray], np.ndarray]


class CompletionCurve(NamedTuple):
  """What is left over time.

  Attributes:
    seconds: when each step has ended, [T + 1], from zero.
    unfinished: rows that are not complete by then, [T + 1].
  """

  seconds: np.ndarray
  unfinished: np.ndarray

  def at(self, seconds: float) -> int:
    """Rows that are not complete after so many seconds."""
    i = np.searchsorted(self.seconds, seconds, side='right') - 1
    return int(self.unfinished[max(i, 0)])


def curve(
  lengths: Sequence[int],
  step: Step,
  *,
  prompt: float = 0.0,
  before: float = 0.0,
  shrinks: bool = True,
) -> CompletionCurve:
  """The rows that are left, all having begun at once.

  Args:
    lengths: tokens of each row.
    step: seconds of a step.
    prompt: tokens of a prompt.
    before: seconds until the first step, to read the prompts.
    shrinks: whether rows that have ended leave the batch, as in an engine, or
      stay until all have, as in a loop that is compiled for so many rows.
  """
  lengths = _lengths(lengths)
  T = int(lengths.max())
  ended = np.bincount(lengths, minlength=T + 1)
  unfinished = len(lengths) - np.cumsum(ended)
  batches = np.concatenate([[len(lengths)], unfinished[1:-1]])
  if not shrinks:
    batches = np.full(T, len(lengths))
  takes = np.zeros(T)
  for batch in np.unique(batches):
    some = np.flatnonzero(batches == batch)
    takes[some] = step(int(batch), prompt + some)
  seconds = np.concatenate([[0.0], np.cumsum(takes)]) + before
  return CompletionCurve(seconds, unfinished)


def finish(
  lengths: Sequence[int], step: Step, *, slots: int | None = None, **kwargs
) -> np.ndarray:
  """When each row is complete, in seconds, [N].

  Args:
    lengths: tokens of each row.
    step: seconds of a step.
    slots: rows that are under way at a time, the next taking the place of
      whichever ends; None for all at once.
    **kwargs: as in `curve`, or `refill` where there are slots.
  """
  if slots is not None and slots < len(lengths):
    return refill(lengths, step, slots=slots, **kwargs)
  return curve(lengths, step, **kwargs).seconds[_lengths(lengths)]


def refill(
  lengths: Sequence[int],
  step: Step,
  *,
  slots: int,
  prompt: float = 0.0,
  before: float = 0.0,
) -> np.ndarray:
  """When each row is complete, if slots are filled as they fall free, [N].

  Args:
    lengths: tokens of each row, in the order in which they begin.
    step: seconds of a step.
    slots: rows that are under way at a time.
    prompt: tokens of a prompt.
    before: seconds to read one prompt, for which all others wait.
  """
  lengths = _lengths(lengths)
  if slots < 1:
    raise ValueError(f'A batch of {slots} slots completes nothing: give 1.')
  first = min(slots, len(lengths))
  done = np.zeros(len(lengths))
  # By the step in which it ends; contexts are as old as their rows.
  under_way = [(int(n), i) for i, n in enumerate(lengths[:first])]
  heapq.heapify(under_way)
  waiting = iter(range(first, len(lengths)))
  now, clock, begun = 0, first * before, 0  # `begun`: sum of steps of begin.
  while under_way:
    end, batch = under_way[0][0], len(under_way)
    context = prompt + np.arange(now, end) - begun / batch
    clock += float(np.sum(np.broadcast_to(step(batch, context), end - now)))
    now = end
    while under_way and under_way[0][0] == now:
      _, i = heapq.heappop(under_way)
      done[i] = clock
      begun -= now - int(lengths[i])
    for i in waiting:
      heapq.heappush(under_way, (now + int(lengths[i]), i))
      begun += now
      clock += before
      if len(under_way) == slots:
        break
  return done


def finished_groups(done: Sequence[float], group: int) -> np.ndarray:
  """When the first k groups are complete: element k - 1, [N / group].

  Args:
    done: when each row is, the rows of a group adjacent.
    group: rows of one.
  """
  done = np.asarray(done, float)
  if len(done) % group:
    raise ValueError(
      f'{len(done)} rows are no whole number of groups of {group}.'
    )
  return np.sort(done.reshape(-1, group).max(1))


class Expected(NamedTuple):
  """What lengths drawn from a histogram come to in the mean, after each token.

  Attributes:
    rows: that are not complete, [T + 1].
    groups: that are complete, [T + 1].
  """

  rows: np.ndarray
  groups: np.ndarray

  def tokens(self, k: float) -> int:
    """Tokens after which k groups are complete in the mean, at the earliest."""
    reached = np.flatnonzero(self.groups >= k - 1e-9)
    if not len(reached):
      raise ValueError(f'There are {self.groups[-1]} groups, not {k}.')
    return int(reached[0])


def expected(histogram: Sequence[float], rows: int, group: int) -> Expected:
  """Rows left and groups complete, for independent lengths.

  Let F(t) be the share of rows of at most t tokens: of N rows N · (1 - F(t))
  are left, and of N / G groups N / G · F(t)ᴳ are complete.

  Args:
    histogram: how often each length was seen, from length 0 on.
    rows: N.
    group: G, rows of a group.
  """
  seen = np.asarray(histogram, float)
  if seen.sum() <= 0 or (seen < 0).any():
    raise ValueError('A histogram counts: it needs a length that was seen.')
  share = np.minimum(np.cumsum(seen) / seen.sum(), 1.0)
  return Expected(rows * (1 - share), rows / group * share**group)


@dataclasses.dataclass(frozen=True)
class Affine:
  """Seconds of a step from what it must read and compute: an assumption.

  Attributes:
    fixed: seconds of a step with no rows, to read all parameters.
    row: seconds a row.
    token: seconds a token that is looked back on, to read keys and values.
  """

  fixed: float
  row: float = 0.0
  token: float = 0.0

  def __call__(self, batch, context):
    return self.fixed + batch * (self.row + self.token * np.asarray(context))


@dataclasses.dataclass(frozen=True)
class Table:
  """Seconds of a step as measured, straight lines between.

  Attributes:
    batches: that were measured, rising.
    contexts: likewise.
    seconds: of each pair, [batches][contexts].
  """

  batches: tuple[int, ...]
  contexts: tuple[float, ...]
  seconds: tuple[tuple[float, ...], ...]

  def __post_init__(self):
    shape = len(self.batches), len(self.contexts)
    if np.shape(self.seconds) != shape or min(shape) < 2:
      raise ValueError(
        f'A table of {shape[0]} batches and {shape[1]} contexts needs as many '
        f'seconds, and two of each at least; got {np.shape(self.seconds)}.'
      )
    for axis in (self.batches, self.contexts):
      if (np.diff(axis) <= 0).any():
        raise ValueError(f'{axis} must rise.')

  def __call__(self, batch, context):
    """Seconds; refuses what lies outside of what was measured."""
    context = np.asarray(context, float)
    for what, at, axis in (
      ('batch', np.asarray(batch), self.batches),
      ('context', context, self.contexts),
    ):
      if at.size and (at.min() < axis[0] or at.max() > axis[-1]):
        raise ValueError(
          f'A step of {what} {at.min()} to {at.max()} was not measured, only '
          f'{axis[0]} to {axis[-1]}: measure it; nothing is extrapolated.'
        )
    i = int(np.clip(np.searchsorted(self.batches, batch), 1, None))
    low, high = self.batches[i - 1], self.batches[i]
    share = (batch - low) / (high - low)
    one, other = (
      np.interp(context, self.contexts, self.seconds[j]) for j in (i - 1, i)
    )
    return one + share * (other - one)


def _lengths(lengths) -> np.ndarray:
  lengths = np.asarray(lengths)
  if lengths.ndim != 1 or not len(lengths) or lengths.min() < 1:
    raise ValueError(
      'Lengths are tokens of each row, at least one of at least one row; got '
      f'{lengths}.'
    )
  return lengths.astype(int)
