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
      'offload', 'restore', or 'elsewhere': of what was begun ahead of its turn,
      who did it when, in another process; that is its `place`.
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

  def elsewhere(self, step, stage, piece, done):
    """Records who has done something elsewhere: names, start and end."""
    piece = piece[0] + 1, piece[1]
    self.extend(
      Span(
        *(step, who, 'elsewhere', stage, piece),
        *(start - self.began, end - self.began, 0.0),
      )
      for who, start, end in done
    )

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


def stage_seconds(spans: Iterable[Span]) -> dict[str, float]:
  """Seconds that stages took, whoever did them.

  Of what a place began ahead of its turn, and only waited for the end of, it is
  the time of the busiest of those who did it, where they say so.
  """
  total, away = seconds(spans), collections.defaultdict(dict)
  for span in spans:
    if span.what == 'elsewhere':
      of = away[span.stage]
      of[span.place] = of.get(span.place, 0.0) + span.end - span.start
  return total | {stage: max(of.values()) for stage, of in away.items()}


def idle_fractions(spans: Iterable[Span]) -> dict[str, float]:
  """Shares of the time of a rollout in simulators that each side waits.

  That is from the first call that simulators have served to the last.
  `simulators` is what their processes have nothing to do in, on average;
  `policy` that in which no other stage runs. Nothing where there are none.
  """
  away = [span for span in spans if span.what == 'elsewhere']
  if not away:
    return {}
  start, end = min(s.start for s in away), max(s.end for s in away)
  served = {s.stage for s in away}
  runs = [s for s in spans if s.what == 'run' and s.stage not in served]
  acts = sum(max(0.0, min(s.end, end) - max(s.start, start)) for s in runs)
  busy = sum(s.end - s.start for s in away) / len({s.place for s in away})
  return {
    'simulators': 1 - busy / (end - start),
    'policy': max(0.0, 1 - acts / (end - start)),
  }
