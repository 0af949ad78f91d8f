"""Models when rows, groups and pieces of a batch end in continuous batching.

All functions take the work of the stage, a `decode.DecodeWork`, and the rows of
one copy of the parameters, which stands for all: its lengths have the
distribution of the batch, and it has the longest row.
"""

import functools

import numpy as np

from planner.costs.decoding import completions
from planner.costs.decoding import contexts as contexts_lib
from planner.costs.decoding import speed as speed_lib


def longest(lengths, rows: float) -> float:
  """Returns the expected tokens of the longest of `rows` random rows.

  E[max] = Σₜ 1 - F(t)ⁿ, where F(t) is the fraction of rows of at most t tokens.
  """
  share = np.cumsum(np.bincount(lengths)) / len(lengths)
  return float(np.sum(1 - np.minimum(share, 1.0) ** rows))


def _seconds(
  decode,
  speed: speed_lib.DecodeSpeed,
  slots: int,
  rows: int,
  contexts: contexts_lib.Contexts,
):
  """Seconds of steps with `rows` active rows, a `completions.Step`.

  A loop also computes its empty slots. A quarter of the slots has a smaller
  loop, in which the last rows are decoded.
  """
  computed = rows
  if not decode.engine:
    few = slots // 4
    computed = few if rows <= few else slots
  empty = 1 - rows / computed
  columns = [x.columns(contexts, empty) for x in decode.attention]
  return speed(computed, columns)


@functools.lru_cache(1024)
def of_groups(
  decode,
  speed: speed_lib.DecodeSpeed,
  rows: int,
  slots: int,
  copies: int,
):
  """Returns when the first k groups finish on a typical copy, [groups].

  Its rows have the same distribution of lengths as the batch, and include the
  longest row of the batch, which determines when the batch ends.
  """
  rows = max(rows, decode.group_size)
  lengths = _typical(decode, rows, rows * copies)
  return completions.finished_groups(
    _done(decode, speed, lengths, slots), decode.group_size
  )


@functools.lru_cache(1024)
def of_pieces(
  decode,
  speed: speed_lib.DecodeSpeed,
  rows: int,
  slots: int,
  copies: int,
  pieces: int,
):
  """Returns when the first k pieces finish on a typical copy, [pieces].

  Each piece has rows of the distribution of the batch. The longest rows of the
  first k pieces of all copies determine when these end.
  """
  each = rows // pieces
  lengths = np.concatenate(
    [_typical(decode, each, each * (k + 1) * copies) for k in range(pieces)]
  )
  done = _done(decode, speed, lengths, slots).reshape(pieces, each)
  return np.maximum.accumulate(done.max(1))


def _typical(decode, rows: int, drawn: int):
  """Returns the lengths of typical rows, with the longest of `drawn` rows."""
  share = (np.arange(rows) + 0.5) / rows
  lengths = np.quantile(decode.lengths, share, method='nearest')
  lengths[-1] = max(lengths[-1], round(longest(decode.lengths, drawn)))
  return np.random.default_rng(0).permutation(lengths).astype(int)


def _done(decode, speed: speed_lib.DecodeSpeed, lengths, slots):
  """Returns when each row finishes."""
  step = functools.partial(_seconds, decode, speed, slots)
  return completions.finish(lengths, step, slots=slots, prompt=decode.context)
