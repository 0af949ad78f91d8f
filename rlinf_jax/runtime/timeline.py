"""A timeline of one record per executed instruction."""

import collections
from collections.abc import Iterable
import math
import threading
import time
from typing import NamedTuple

from planner.costs import measured


class Span(NamedTuple):
  """An instruction that a place has executed.

  Attributes:
    step: number of the update it belongs to, from one.
    place: where it ran; of 'elsewhere', the worker process.
    what: 'run', 'send', 'wait' (for a value, or for shared devices), 'offload',
      'restore', or 'elsewhere' (work of another process for an asynchronous
      stage).
    stage: the stage; otherwise the name of the value, or 'shared devices'.
    piece: number of the piece of the batch, from one, and number of pieces.
    start: seconds since the timeline's origin.
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
  """Spans on one clock. Any thread may add to it.

  Attributes:
    origin: the clock's zero, by `time.perf_counter`.
    epoch: the same moment in seconds since 1970, which relates the clocks of
      processes to each other.
    spans: those that `take` has not returned yet.
  """

  def __init__(self):
    self.origin, self.epoch = time.perf_counter(), time.time()
    self.spans: list[Span] = []
    self._lock = threading.Lock()

  def now(self) -> tuple[float, float]:
    """Seconds since the origin, and CPU-seconds of the process."""
    return time.perf_counter() - self.origin, time.process_time()

  def add(self, step, place, what, stage, start, piece=(0, 1)):
    """Adds a span that ends now.

    Args:
      step: as `Span`, and so are `place`, `what` and `stage`.
      place: as `Span`.
      what: as `Span`.
      stage: as `Span`.
      start: what `now` returned when it began.
      piece: number of the piece, from zero, and number of pieces.
    """
    end = self.now()
    span = Span(
      step,
      place,
      what,
      stage,
      piece=(piece[0] + 1, piece[1]),
      start=start[0],
      end=end[0],
      cpu=end[1] - start[1],
    )
    with self._lock:
      self.spans.append(span)

  def add_elsewhere(self, step, stage, piece, work):
    """Adds what worker processes have done for an asynchronous call.

    Args:
      step: as `Span`.
      stage: as `Span`.
      piece: as `add`.
      work: worker, start and end of each, by `time.perf_counter`.
    """
    self.extend(
      Span(
        step,
        worker,
        'elsewhere',
        stage,
        piece=(piece[0] + 1, piece[1]),
        start=start - self.origin,
        end=end - self.origin,
        cpu=0.0,
      )
      for worker, start, end in work
    )

  def extend(self, spans: Iterable[Span]):
    """Adds spans that are already on this clock."""
    with self._lock:
      self.spans.extend(spans)

  def take(self, step: float = math.inf) -> list[Span]:
    """Removes and returns the spans of steps up to `step`."""
    with self._lock:
      taken = [span for span in self.spans if span.step <= step]
      self.spans = [span for span in self.spans if span.step > step]
    return taken


def seconds(spans: Iterable[Span], by: str = 'stage') -> dict[str, float]:
  """Seconds that stages ran, by `stage` or by `place`.

  Among the stages are moves to and from host memory, as `HOST_MOVES`.
  """
  total = collections.defaultdict(float)
  for span in spans:
    if span.what == 'run':
      total[getattr(span, by)] += span.end - span.start
    elif span.what in ('offload', 'restore') and by == 'stage':
      total[measured.HOST_MOVES] += span.end - span.start
  return dict(total)


def stage_seconds(spans: Iterable[Span]) -> dict[str, float]:
  """Seconds that each stage took, worker processes included.

  An asynchronous stage takes as long as its busiest worker, where workers are
  recorded: its own span only waits for them.
  """
  total, workers = seconds(spans), collections.defaultdict(dict)
  for span in spans:
    if span.what == 'elsewhere':
      by_worker = workers[span.stage]
      worked = by_worker.get(span.place, 0.0) + span.end - span.start
      by_worker[span.place] = worked
  return total | {stage: max(of.values()) for stage, of in workers.items()}


def idle_fractions(spans: Iterable[Span]) -> dict[str, float]:
  """Fractions of a rollout in simulators that each side is idle.

  The rollout lasts from the first call that a simulator served to the last.

  Returns:
    'simulators': the fraction in which simulator processes are idle, on
    average; 'policy': that in which no other stage runs. Empty without
    simulators.
  """
  served = [span for span in spans if span.what == 'elsewhere']
  if not served:
    return {}
  start, end = min(s.start for s in served), max(s.end for s in served)
  stages = {s.stage for s in served}
  runs = [s for s in spans if s.what == 'run' and s.stage not in stages]
  acting = sum(max(0.0, min(s.end, end) - max(s.start, start)) for s in runs)
  busy = sum(s.end - s.start for s in served) / len({s.place for s in served})
  return {
    'simulators': 1 - busy / (end - start),
    'policy': max(0.0, 1 - acting / (end - start)),
  }
