"""What ran when: one record an executed instruction."""

import collections
from collections.abc import Iterable
import math
import threading
import time
from typing import NamedTuple


class Span(NamedTuple):
  """An instruction that a place carried out.

  Attributes:
    step: the update it belongs to, from one.
    place: where it ran.
    what: 'run', 'send', 'wait' (for a value, or for devices that are shared),
      'evict' or 'restore'.
    stage: what ran; where no stage did, the name of the value, or 'shared
      devices'.
    piece: which piece of the batch, from one, and of how many.
    start: seconds since the timeline began.
    end: likewise.
    cpu: CPU-seconds that the whole process used meanwhile.
  """

  step: int
  place: str
  what: str
  stage: str
  piece: tuple[int, int]
  start: float
  end: float
  cpu: float


class Timeline:
  """Spans of the current step, on one clock. Places may write at once.

  Attributes:
    epoch: when it began, in seconds since 1970: what clocks of processes are
      told apart by.
    spans: that were not taken yet.
  """

  def __init__(self):
    self.began, self.epoch = time.perf_counter(), time.time()
    self.spans: list[Span] = []
    self._lock = threading.Lock()

  def now(self) -> tuple[float, float]:
    """Seconds since it began, and CPU-seconds of the process."""
    return time.perf_counter() - self.began, time.process_time()

  def add(self, step, place, what, stage, start, piece=(0, 1)):
    """Records that `what`, begun at `start`, has just ended."""
    end = self.now()
    piece = piece[0] + 1, piece[1]
    span = Span(
      *(step, place, what, stage, piece),
      *(start[0], end[0], end[1] - start[1]),
    )
    with self._lock:
      self.spans.append(span)

  def extend(self, spans: Iterable[Span]):
    """Adds what another process has recorded, on this clock."""
    with self._lock:
      self.spans.extend(spans)

  def take(self, step: float = math.inf) -> list[Span]:
    """The spans since it was last asked, of steps up to `step`."""
    with self._lock:  # A place may be adding to them.
      taken = [span for span in self.spans if span.step <= step]
      self.spans = [span for span in self.spans if span.step > step]
    return taken


def seconds(spans: Iterable[Span], by: str = 'stage') -> dict[str, float]:
  """Seconds that stages ran, by `stage` or by `place`."""
  total = collections.defaultdict(float)
  for span in spans:
    if span.what == 'run':
      total[getattr(span, by)] += span.end - span.start
  return dict(total)
