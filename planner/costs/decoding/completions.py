"""Models when the completions of a batch finish.

Decoding takes a step for each token of the longest row, while other rows finish
one by one. The time at which the first groups are complete decides whether
learning should overlap with decoding.

Lengths are tokens of each row; the rows of a group are adjacent. A step decodes
one token of every active row. `step(batch, contexts)` returns the seconds of
each step of `contexts`.
"""

from collections.abc import Callable, Sequence
import heapq

import numpy as np

from planner.costs.decoding import contexts as contexts_lib

Step = Callable[[int, contexts_lib.Contexts], np.ndarray]


def finish(
  lengths: Sequence[int],
  step: Step,
  *,
  slots: int | None = None,
  prompt: float = 0.0,
) -> np.ndarray:
  """Returns the seconds at which each row finishes, [N].

  Args:
    lengths: tokens of each row.
    step: seconds of a step.
    slots: largest number of active rows; the next row starts when one finishes.
      None for all at once.
    prompt: tokens of a prompt.
  """
  if slots is not None and slots < len(lengths):
    return refill(lengths, step, slots=slots, prompt=prompt)
  lengths = _lengths(lengths)
  ended = np.cumsum(np.bincount(lengths))
  batches, takes = len(lengths) - ended[:-1], np.zeros(lengths.max())
  for batch in np.unique(batches):
    some = np.flatnonzero(batches == batch)
    takes[some] = step(int(batch), contexts_lib.Contexts([0], some, prompt))
  return np.cumsum(takes)[lengths - 1]


def refill(
  lengths: Sequence[int],
  step: Step,
  *,
  slots: int,
  prompt: float = 0.0,
) -> np.ndarray:
  """Returns when each row finishes with continuous batching, [N].

  Args:
    lengths: tokens of each row, in the order in which they start.
    step: seconds of a step.
    slots: largest number of active rows.
    prompt: tokens of a prompt.
  """
  lengths = _lengths(lengths)
  if slots < 1:
    raise ValueError(f'A batch needs at least 1 slot, got {slots}.')
  first = min(slots, len(lengths))
  done = np.zeros(len(lengths))
  # A heap by the step in which a row ends.
  active = [(int(n), i) for i, n in enumerate(lengths[:first])]
  heapq.heapify(active)
  waiting = iter(range(first, len(lengths)))
  # The steps in which the active rows started, the first first.
  starts = dict.fromkeys(range(first), 0)
  now, clock = 0, 0.0
  while active:
    end, batch = active[0][0], len(active)
    some = np.arange(now, end)
    contexts = contexts_lib.Contexts([*starts.values()], some, prompt)
    clock += float(np.sum(np.broadcast_to(step(batch, contexts), end - now)))
    now = end
    while active and active[0][0] == now:
      _, i = heapq.heappop(active)
      done[i] = clock
      del starts[i]
    for i in waiting:
      heapq.heappush(active, (now + int(lengths[i]), i))
      starts[i] = now
      if len(active) == slots:
        break
  return done


def finished_groups(done: Sequence[float], group: int) -> np.ndarray:
  """Returns when the first k groups are complete: element k - 1, [N / group].

  Args:
    done: when each row finishes; the rows of a group are adjacent.
    group: rows of a group.
  """
  done = np.asarray(done, float)
  if len(done) % group:
    raise ValueError(
      f'{len(done)} rows are no whole number of groups of {group}.'
    )
  return np.sort(done.reshape(-1, group).max(1))


def _lengths(lengths) -> np.ndarray:
  lengths = np.asarray(lengths)
  if lengths.ndim != 1 or not len(lengths) or lengths.min() < 1:
    raise ValueError(
      'Lengths are tokens of each row, at least one of at least one row; got '
      f'{lengths}.'
    )
  return lengths.astype(int)
