"""A time limit that every phase of planning keeps."""

from collections.abc import Callable
import math
import time


class TimeUp(Exception):
  """The time limit has passed, and the phase under way has no result."""


class Deadline:
  """The time at which planning stops.

  Its seconds are those in which a processor works for the calling thread. So on
  a busy machine a search takes longer, and ends with the same proof.

  It is passed down to everything that takes long, and asked there before each
  piece of work, such as an option of a place, a batch of bounds or a
  simulation. So a limit is exceeded by one such piece at most.
  """

  def __init__(
    self,
    seconds: float = math.inf,
    clock: Callable[[], float] = time.thread_time,
  ):
    """Begins now.

    Args:
      seconds: until the deadline; infinite for none.
      clock: a function that returns the time in seconds. By default it is a
        thread's own, and no other thread should ask.
    """
    self._clock = clock
    self._end = clock() + seconds

  @property
  def left(self) -> float:
    """Seconds until the deadline, at least zero."""
    return max(0.0, self._end - self._clock())

  @property
  def has_passed(self) -> bool:
    return self._clock() >= self._end

  def check(self):
    """Raises `TimeUp` if the deadline has passed."""
    if self.has_passed:
      raise TimeUp('The time limit of planning has passed.')

  def part(self, share: float) -> 'Deadline':
    """Returns a deadline after a share of the time that is left."""
    return Deadline(self.left * share, self._clock)


NEVER = Deadline()
