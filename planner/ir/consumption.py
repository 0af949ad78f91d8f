"""Checks that values which a stage uses up are read only once.

A simulator's token stands for its state, which a step of the simulator
overwrites. So only one stage may read a token, and later stages must read the
token that it returned.
"""

from collections.abc import Iterable


class ReadTracker:
  """Records which stage read a value last, and which stage used it up."""

  def __init__(self):
    self.readers: dict[int, str] = {}
    self.used: dict[int, str] = {}

  def add(self, stage: str, reads: Iterable[int], consumes, names):
    """Records a call; refuses to read a value that is used up.

    Args:
      stage: name of the stage.
      reads: ids of its arguments, with repetitions.
      consumes: ids of the arguments that it uses up.
      names: a function from ids to names.
    """
    reads = list(reads)
    for v in dict.fromkeys(reads):
      if v in self.used:
        raise TypeError(
          f'Stage {stage} was given {names(v)}, which stage {self.used[v]} has '
          'used up: read what that returned instead.'
        )
      other = self.readers.get(v)
      if v in consumes and reads.count(v) > 1:
        other = stage
      if v in consumes and other is not None:
        raise TypeError(
          f'Stage {stage} uses up {names(v)}, which stage {other} reads too. '
          'A value that is used up is read once: let one of them return it.'
        )
    self.readers |= dict.fromkeys(reads, stage)
    self.used |= dict.fromkeys(consumes, stage)

  def check_end(self, carry, outputs: Iterable[int], names):
    """Refuses to return a value that is used up, or to carry it twice.

    Args:
      carry: pairs of ids, `(at start of step, at end of step)`.
      outputs: ids of the other values that the step returns.
      names: a function from ids to names.
    """
    ends = [*(end for _, end in carry), *outputs]
    for v in ends:
      if v in self.used:
        raise TypeError(
          f'The step returns {names(v)}, which stage {self.used[v]} has used '
          'up: return what that returned.'
        )
    for start, end in carry:
      if start in self.used and ends.count(end) > 1:
        raise TypeError(
          f'The step returns {names(end)} more than once, and its next call '
          f'will use it up as {names(start)}: keep it there alone.'
        )
