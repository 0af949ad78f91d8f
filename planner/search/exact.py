"""Finds the fastest plan of a declared space, and proves that it is.

Every plan is timed by what its programs would take in simulation. To simulate
them all would take too long, so sets of plans that differ in the sizes of their
places are halved, best bound first, and left alone as soon as the least that
any of them could take is no less than what the best plan so far does take. What
is left when nothing is left is the fastest plan; how far the search has come
when it is stopped earlier is its gap.
"""

from collections.abc import Sequence
import dataclasses
import heapq
import itertools
import json
import time
from typing import Protocol

import numpy as np

from planner.ir import graph
from planner.ir import plan as plan_lib
from planner.search import branch_and_bound, timing
from planner.search import choices as choices_lib
from planner.simulation import evaluate_plan

Axes = tuple[tuple[str, int], ...]
ROUNDING = 1e-9  # Sums of the same seconds differ by less, relatively.


class Model(Protocol):
  """What stages, moves and memory cost on placements.

  Costs of a place depend on what is said of it alone: its stages, how many
  devices it has (they are consecutive), its axes, and the plan's pieces, rows
  and offloads; memory on which carried values live there, too. Nothing but
  `crowding` depends on how large other places are.

  Attributes:
    capacity: bytes of a device that may be used.
  """

  capacity: float

  def axes(self, stages: tuple[str, ...], devices: int) -> Sequence[Axes]:
    """Meshes that a place of these stages may have; none if it cannot be."""

  def seconds(
    self,
    flow: graph.Flow,
    node: graph.Node,
    placement: plan_lib.Placement,
    rows: int | None,
  ) -> float:
    """Of one call of a node of the cut flow, so many rows at a time."""

  def transfer(
    self,
    flow: graph.Flow,
    value: int,
    source: plan_lib.Placement,
    target: plan_lib.Placement,
  ) -> float:
    """Of a value of the cut flow, from place to place."""

  def switch(
    self, flow: graph.Flow, value: int, placement: plan_lib.Placement
  ) -> float:
    """Of a value between the memory of devices and of their host."""

  def crowding(self, stage: str, devices: int, beside: int) -> float:
    """How many times as long a call on so many devices takes, 1 or more.

    It does while so many others are busy, too.
    """

  def memory(
    self, flow: graph.Flow, chosen: plan_lib.Plan, place: str
  ) -> float:
    """Bytes that a device of a place needs at its worst moment.

    The flow is as recorded: `chosen.pieces` says how it is cut.
    """


@dataclasses.dataclass(frozen=True)
class Space:
  """The plans among which the fastest is sought.

  Attributes:
    devices: that there are; a plan may leave some idle.
    unit: sizes of places are multiples of this: 1, or a whole machine.
    places: at most so many.
    fewest: at least so many.
    pieces: in how many a batch may pass; what cannot be is left out.
    micro_batch: of a stage, the numbers of rows that it may take at once (None:
      all that it is given). Stages that are not named take all.
    offload: stages whose carried values may wait in host memory.
    together: stages that share a place whatever the plan.
  """

  devices: int
  unit: int = 1
  places: int = 4
  fewest: int = 1
  pieces: tuple[int, ...] = (1,)
  micro_batch: tuple[tuple[str, tuple[int | None, ...]], ...] = ()
  offload: tuple[str, ...] = ()
  together: tuple[tuple[str, ...], ...] = ()

  def __post_init__(self):
    if isinstance(self.micro_batch, dict):
      rows = tuple(
        (s, tuple(options)) for s, options in self.micro_batch.items()
      )
      object.__setattr__(self, 'micro_batch', rows)
    if self.unit < 1 or self.devices < self.unit:
      raise ValueError(
        f'A space of {self.devices} devices has no place of {self.unit}: '
        'the unit is at least 1 and at most all devices.'
      )
    if not 1 <= self.fewest <= self.places:
      raise ValueError(
        f'A space of at least {self.fewest} and at most {self.places} places '
        'has no plan: give 1 or more of each, and no fewer at most.'
      )
    if not self.pieces or min(self.pieces) < 1:
      raise ValueError(
        f'A space of batches in {self.pieces} pieces has no plan: give 1 or '
        'more.'
      )

  def to_json(self) -> str:
    return json.dumps(dataclasses.asdict(self), indent=2)


@dataclasses.dataclass(frozen=True)
class Found:
  """What a search has found.

  Attributes:
    best: the fastest plan; None if none fits in memory, or takes less than what
      was asked for.
    seconds: that a step of it takes, as simulated, and no less than its bound
      where a few steps do not show yet which place falls behind.
    bound: that a step of no plan of the space can take less than; None where
      the strategy proves nothing.
    gap: how much faster than `best` a plan might be, of 1; 0 is a proof.
    ranked: the fastest plans that were simulated, and their seconds. Only the
      first is proved to have its rank.
    infeasible: plans that need too much memory, nearest to feasible first, and
      the inequality that they violate.
    space: what was searched.
    tried: plans and sets of plans that were bounded.
    simulated: plans that were simulated.
  """

  best: plan_lib.Plan | None
  seconds: float
  bound: float | None
  gap: float | None
  ranked: list[tuple[plan_lib.Plan, float]]
  infeasible: list[tuple[plan_lib.Plan, str]]
  space: Space
  tried: int
  simulated: int


def search(
  flow: graph.Flow,
  model: Model,
  space: Space,
  *,
  ahead: int = 0,
  keep: int = 5,
  seconds: float | None = None,
  below: float = np.inf,
) -> Found:
  """Returns the fastest plan of a space, with a certificate.

  Args:
    flow: as recorded.
    model: of the costs.
    space: of the plans.
    ahead: steps that may begin before an earlier one has ended: the lag of the
      workflow.
    keep: how many of the fastest plans to return.
    seconds: to stop after, with the gap that is left; None to go to the end.
    below: seconds of a step; a plan that takes as long or longer is not sought.
      That there is no faster one is then what the certificate says.
  """
  return Search(flow, model, space, ahead, keep, below).run(seconds)


class Search:
  """A search under way.

  Attributes:
    best: seconds of the fastest plan so far, or of what it must be faster than.
    open: sets of plans that may hold a faster one.
    leaves: plans that may be faster, by the least that they take.
  """

  def __init__(self, flow, model, space, ahead, keep, below=np.inf):
    self.choices = choices_lib.Choices(flow, model, space)
    self.space, self.ahead, self.keep = space, ahead, keep
    half = evaluate_plan.STEPS // 2
    self.share = half // (1 + ahead) / half  # Of a step that passes alone.
    self.best, self.below, self.ranked = below, below, []
    self.leaves, self.ticket = [], itertools.count()
    self.tried = self.simulated = 0
    self.seen = set()
    cuts = self.choices.cuts.values()
    self.open = {
      cut.pieces: branch_and_bound.Sets(self.choices, cut) for cut in cuts
    }

  @property
  def enough(self) -> float:
    """A bound of so many seconds is no better than the best."""
    return self.best * (1 - ROUNDING)

  def run(self, seconds) -> Found:
    rounds = itertools.count()
    deadline = np.inf if seconds is None else time.monotonic() + seconds
    for opened in self.open.values():
      opened.add(*self._whole(opened), self)
      if self.space.fewest == 1:
        self._leaf(opened, 0, (self.choices.units,))
    while self.leaves and not self.simulated:
      self._dive()
    while self._least() < self.enough and time.monotonic() < deadline:
      while self.leaves and self.leaves[0][0] <= self._least_open():
        if self.leaves[0][0] >= self.enough or time.monotonic() > deadline:
          break
        self._dive()
      opened = min(self.open.values(), key=lambda o: o.least)
      if not next(rounds) % 8:
        for some in self.open.values():
          for part, units in some.guess(self):
            self._leaf(some, part, units)
            self._dive()
            self._dive()
      if opened.least < self.enough:
        for part, units in opened.halve(self):
          self._leaf(opened, part, units)
        self._dive()
    return self._found()

  def _whole(self, opened):
    """Every partition, as the set of all its plans."""
    blocks, units = self.choices.blocks, self.choices.units
    sizes = np.array([len(some) for some in blocks])
    there = np.arange(self.space.places) < sizes[:, None]
    fits = np.flatnonzero(sizes <= units)
    low = there.astype(int)[fits]
    return fits, low, low * units

  def _least_open(self):
    return min((opened.least for opened in self.open.values()), default=np.inf)

  def _least(self):
    leaf = self.leaves[0][0] if self.leaves else np.inf
    return min(leaf, self._least_open())

  def bound(self, opened, seconds, at, delays=None, waits=None):
    """The least seconds from step to step, of every column."""
    self.tried += seconds.shape[1]
    return opened.cut.floor.period(
      seconds, at, self.share, delays, waits, self.enough
    )

  def _leaf(self, opened, part: int, units):
    """Bounds all plans whose places have these sizes."""
    choices, cut = self.choices, opened.cut
    if (cut.pieces, part, units) in self.seen:
      return
    self.seen.add((cut.pieces, part, units))
    blocks = choices.blocks[part]
    at = choices.place_of[part][cut.group]
    for offload in choices.offloads:
      fitting = [
        choices.fitting(cut, part, b, n, offload) for b, n in enumerate(units)
      ]
      columns = [
        [choices.column(cut, block, n, *option) for option in options]
        for block, n, options in zip(blocks, units, fitting, strict=True)
      ]
      ways = itertools.product(*(range(len(options)) for options in fitting))
      while some := list(itertools.islice(ways, branch_and_bound.BATCH)):
        seconds = np.stack(
          [sum(columns[b][o] for b, o in enumerate(way)) for way in some],
          axis=1,
        )
        spread = np.broadcast_to(at[:, None], seconds.shape)
        bounds = self.bound(opened, seconds, spread)
        for k in np.flatnonzero(bounds < self.enough):
          axes, rows = zip(
            *(fitting[b][o] for b, o in enumerate(some[k])), strict=True
          )
          choice = choices_lib.Choice(
            cut.pieces, part, units, axes, rows, offload
          )
          self._push(choice, bounds[k], seconds[:, k : k + 1])

  def _push(self, choice, bound, seconds):
    heapq.heappush(self.leaves, (bound, next(self.ticket), choice, seconds))

  def _dive(self):
    """Simulates the plan of the least bound, if moves do not rule it out."""
    if not self.leaves:
      return
    bound, _, choice, seconds = heapq.heappop(self.leaves)
    if bound >= self.enough:
      self.leaves.clear()
      return
    if seconds is not None:
      opened = self.open[choice.pieces]
      at = self.choices.place_of[choice.part][opened.cut.group][:, None]
      delays, waits, more = timing.moves(self.choices, choice)
      bound = self.bound(opened, seconds + more, at, delays, waits)[0]
      if bound < self.enough:
        self._push(choice, bound, None)
      return
    if self.choices.overflows(choice):
      return
    self.simulated += 1
    chosen, found = timing.simulate(self.choices, choice, self.ahead)
    found = chosen, max(found, bound)
    self.ranked = sorted([*self.ranked, found], key=lambda pair: pair[1])
    del self.ranked[self.keep :]
    self.best = min(self.best, found[1])

  def _found(self) -> Found:
    best = None
    if self.ranked and not self.below <= self.ranked[0][1]:
      best = self.ranked[0][0]
    least = self._least()
    bound = self.best if least >= self.enough else least
    gap = 0.0 if bound >= self.best else 1.0
    if self.best < np.inf:
      gap = 1 - bound / self.best if self.best else 0.0
    return Found(
      best,
      self.best,
      float(bound),
      float(gap),
      self.ranked,
      [(chosen, words) for _, chosen, words in self.choices.infeasible],
      self.space,
      self.tried,
      self.simulated,
    )
