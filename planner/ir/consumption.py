"""What is used up is read once: who reads what, while a step is recorded.

The token of a simulator stands for its state, which a step of it overwrites. So
whoever reads the token must be the only one, and go on with what it returns.
"""

from collections.abc import Iterable


class Reads:
  """Which stages have read a value, and which has used it up."""

  def __init__(self):
    self.readers: dict[int, str] = {}
    self.used: dict[int, str] = {}

  def add(self, stage: str, reads: Iterable[int], linear, names):
    """Notes a call; refuses it where a value that is used up is read again.

    Args:
      stage: its name.
      reads: ids of what it is given, as often as it is given them.
      linear: those that it uses up.
      names: of values, by id.
    """
    reads = list(reads)
    for v in dict.fromkeys(reads):
      if v in self.used:
        raise TypeError(
          f'Stage {stage} was given {names(v)}, which stage {self.used[v]} has '
          'used up: go on with what that returned.'
        )
      other = self.readers.get(v)
      if v in linear and reads.count(v) > 1:
        other = stage
      if v in linear and other is not None:
        raise TypeError(
          f'Stage {stage} uses up {names(v)}, which stage {other} reads too. '
          'What is used up is read once: let one of them return it anew.'
        )
    self.readers |= dict.fromkeys(reads, stage)
    self.used |= dict.fromkeys(linear, stage)

  def check_end(self, carry, outputs: Iterable[int], names):
    """Refuses to return what is used up, or to keep it twice.

    Args:
      carry: pairs of ids, `(at start of step, at end of step)`.
      outputs: ids of what else the step returns.
      names: of values, by id.
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
