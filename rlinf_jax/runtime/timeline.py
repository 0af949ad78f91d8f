"""What ran when: one record an executed stage."""

import collections
import time
from typing import NamedTuple


class Span(NamedTuple):
  """A stage call.

  Attributes:
    step: the update it belongs to, from one.
    place: where it ran.
    stage: what ran.
    start: seconds since the timeline began.
    end: likewise.
    cpu: CPU-seconds that the whole process used meanwhile.
  """

  step: int
  place: str
  stage: str
  start: float
  end: float
  cpu: float


class Timeline:
  """Spans of the current step, on one clock."""

  def __init__(self):
    self.began = time.perf_counter()
    self.spans: list[Span] = []

  def now(self) -> tuple[float, float]:
    """Seconds since it began, and CPU-seconds of the process."""
    return time.perf_counter() - self.began, time.process_time()

  def add(self, step: int, place: str, stage: str, start: tuple[float, float]):
    """Records that `stage`, begun at `start`, has just ended."""
    end = self.now()
    self.spans.append(
      Span(step, place, stage, start[0], end[0], end[1] - start[1])
    )

  def take(self) -> list[Span]:
    """The spans since it was last asked."""
    spans, self.spans = self.spans, []
    return spans


def seconds(spans) -> dict[str, float]:
  """Seconds by stage."""
  total = collections.defaultdict(float)
  for span in spans:
    total[span.stage] += span.end - span.start
  return dict(total)
