"""RLinf's Algorithm 1 (arXiv:2509.15965): plans by cutting the graph in two.

A cycle of the graph of stages counts as one stage. Either all stages share a
place and run one after another, or the graph is cut in two: the first part runs
on some of the devices and the second on the rest, as a pipeline:

  T = T_critical + (M / m − 1) · T_bottleneck

for a batch of M rows that passes in pieces of m rows. Every cut that no edge
crosses backwards is tried with every division of the devices, and the fastest
schedule of every part is memoized.

In the paper, a part that is cut again may also alternate with another part on
the same devices. Here each device belongs to one place, so only the stages of
one place alternate. Whether their state must leave the devices meanwhile is a
question of memory: a place takes the first set of offloads with which it fits.
"""

import itertools
from typing import NamedTuple

import numpy as np

from planner.costs import cost_model
from planner.ir import graph
from planner.lower import offloading
from planner.search import deadline as deadline_lib
from planner.search import pieces as pieces_lib
from planner.search import result as result_lib
from planner.search import timing
from planner.search.plans import choices as choices_lib
from planner.search.plans import space as space_lib


class _Schedule(NamedTuple):
  """The fastest schedule of a part of the graph, by its units, [units + 1].

  Attributes:
    critical: seconds of the first piece from end to end.
    bottleneck: seconds of the slowest place for one piece.
    blocks: for each entry, the groups and the units of each place.
  """

  critical: np.ndarray
  bottleneck: np.ndarray
  blocks: list


def algorithm1(
  flow: graph.Flow,
  model: cost_model.Model,
  space: space_lib.Space,
  *,
  staleness: int = 0,
  keep: int = 5,
  deadline: deadline_lib.Deadline = deadline_lib.NEVER,
) -> result_lib.SearchResult:
  """Returns the plan that Algorithm 1 expects to be fastest, simulated.

  Args:
    flow: as recorded.
    model: the cost model.
    space: the plans to choose from.
    staleness: as in `exact.search`; only the simulation uses it.
    keep: how many plans to return, of the best of each number of pieces.
    deadline: when to stop.

  Raises:
    deadline.TimeUp: if time is up before it has ended. Without all divisions of
      the devices, its plan is not known.
    ValueError: if the space needs several places. The algorithm compares every
      part on a place with all cuts of the part.
  """
  if space.min_places > 1:
    raise ValueError(
      f'Algorithm 1 cannot search plans of {space.min_places} places or more: '
      'it compares cuts with a single place. Set min_places = 1, or use '
      '`exact.search`.'
    )
  choices = choices_lib.Choices(flow, model, space, deadline)
  best, ranked, tried = None, [], 0
  for cut in choices.cuts.values():
    estimate, choice, more = choose(choices, cut)
    tried += more
    if choice is None or choices.overflows(choice):
      continue
    found = timing.simulate(choices, choice, staleness)
    ranked.append(found)
    if best is None or estimate < best[0]:
      best = estimate, *found
  ranked.sort(key=lambda pair: pair[1])
  return result_lib.SearchResult(
    best=best and best[1],
    seconds=best[2] if best else np.inf,
    bound=None,
    gap=None,
    ranked=ranked[:keep],
    infeasible=[(chosen, words) for _, chosen, words in choices.infeasible],
    space=space,
    tried=tried,
    simulated=len(ranked),
  )


class Chosen(NamedTuple):
  """The choice of Algorithm 1 for one number of pieces.

  Attributes:
    seconds: what it expects a step to take.
    choice: the plan, which may need too much memory once its places are put
      together; None if no place fits.
    tried: number of divisions of the devices that were compared.
  """

  seconds: float
  choice: choices_lib.Choice | None
  tried: int


def choose(choices: choices_lib.Choices, cut: pieces_lib.CutFlow) -> Chosen:
  """Returns the plan that is expected to be fastest for a number of pieces.

  Raises:
    deadline.TimeUp: if the deadline of `choices` passes before.
  """
  made = _Algorithm(choices, cut)
  return Chosen(*made.best(), made.tried)


class _Algorithm:
  """The algorithm for one number of pieces.

  Attributes:
    parts: the nodes of the graph without cycles, as sets of bits of groups.
    edges: pairs of such parts.
    memo: the fastest schedules so far, by parts and places.
  """

  def __init__(self, choices, cut):
    self.choices, self.cut, self.tried = choices, cut, 0
    self.parts, self.edges = _without_cycles(choices)
    self.memo, self.partitions, self.alone = {}, {}, {}

  def best(self):
    """Returns the expected seconds and the plan."""
    schedule = self.schedules(
      range(len(self.parts)), self.choices.space.max_places
    )
    seconds = self.expected(schedule.critical, schedule.bottleneck)
    units = int(np.argmin(seconds))
    if seconds[units] == np.inf:
      return np.inf, None
    return seconds[units], self.choice(schedule.blocks[units])

  def expected(self, critical, bottleneck):
    more = self.cut.pieces - 1
    return critical + more * bottleneck if more else critical

  def schedules(self, parts, places: int) -> _Schedule:
    """Returns the fastest schedules of parts on at most `places` places."""
    key = frozenset(parts), places
    if key not in self.memo:
      self.memo[key] = self._schedules(sorted(parts), places)
    return self.memo[key]

  def _schedules(self, parts, places) -> _Schedule:
    schedule = self.one_place(sum(self.parts[p] for p in parts))
    if places == 1 or len(parts) == 1:
      return schedule
    critical, bottleneck = schedule.critical.copy(), schedule.bottleneck.copy()
    # A copy: of one piece, `expected` returns its argument, which is memoized.
    best = self.expected(schedule.critical, schedule.bottleneck).copy()
    blocks = list(schedule.blocks)
    n = self.choices.units
    for first in self._first_parts(parts):
      rest = [p for p in parts if p not in first]
      for mine in range(1, places):
        one, other = (
          self.schedules(first, mine),
          self.schedules(rest, places - mine),
        )
        self.choices.deadline.check()
        for units in range(2, n + 1):
          here = np.arange(1, units)
          path = one.critical[here] + other.critical[units - here]
          slow = np.maximum(
            one.bottleneck[here], other.bottleneck[units - here]
          )
          expected = self.expected(path, slow)
          self.tried += len(here)
          at = int(np.argmin(expected))
          if expected[at] < best[units]:
            best[units] = expected[at]
            critical[units], bottleneck[units] = path[at], slow[at]
            blocks[units] = one.blocks[at + 1] + other.blocks[units - at - 1]
    return _Schedule(critical, bottleneck, blocks)

  def _first_parts(self, parts):
    """Yields the cuts: sets of parts that read nothing from the others."""
    for size in range(1, len(parts)):
      for first in itertools.combinations(parts, size):
        if not any(
          j not in first and j in parts and i in first for j, i in self.edges
        ):
          yield first

  def one_place(self, block: int) -> _Schedule:
    """Schedules all stages one after another on one place, if that fits."""
    if block not in self.alone:
      n = self.choices.units
      piece = np.full(n + 1, np.inf)
      for units in range(1, n + 1):
        if found := self.fastest(block, units):
          piece[units] = found[0] / self.cut.pieces
      blocks = [((block, units),) for units in range(n + 1)]
      self.alone[block] = _Schedule(piece, piece, blocks)
    return self.alone[block]

  def fastest(self, block: int, units: int):
    """Returns seconds, options and offloads of a place; None if none fits."""
    part, b = self.where(block)
    for offload in self.choices.offloads:
      fits = self.choices.fitting(self.cut, part, b, units, offload)
      priced = [
        (
          self.choices.column(self.cut, block, units, *option).sum()
          + self.switches(block, units, option[0], offload),
          i,
        )
        for i, option in enumerate(fits)
      ]
      if priced:
        seconds, i = min(priced)
        return seconds, fits[i], offload
    return None

  def where(self, block: int):
    """Returns a partition with that place and as few others as possible."""
    if block not in self.partitions:
      self.partitions[block] = next(
        (part, blocks.index(block))
        for part, blocks in sorted(
          enumerate(self.choices.blocks), key=lambda pair: len(pair[1])
        )
        if block in blocks
      )
    return self.partitions[block]

  def switches(self, block: int, units: int, axes, offload) -> float:
    """Returns the seconds of offloading and restoring values once a step."""
    flow, model = self.choices.flow, self.choices.model
    placement = self.choices.placement(0, units, axes)
    stages = set(offload).intersection(self.choices.stages(block))
    return sum(
      2 * model.switch(flow, start, placement)
      for start in offloading.private(flow, stages)
    )

  def choice(self, blocks) -> choices_lib.Choice:
    """Returns the chosen places as a plan."""
    blocks = sorted(blocks, key=lambda pair: pair[0] & -pair[0])
    part = self.choices.blocks.index(tuple(block for block, _ in blocks))
    found = [self.fastest(block, units) for block, units in blocks]
    offload = {stage for _, _, some in found for stage in some}
    axes, executions = zip(*(option for _, option, _ in found), strict=True)
    return choices_lib.Choice(
      self.cut.pieces,
      part,
      tuple(units for _, units in blocks),
      axes,
      executions,
      tuple(s for s in self.choices.space.offload if s in offload),
    )


def _without_cycles(choices):
  """Contracts the cycles of the graph of groups, in topological order.

  Returns:
    The contracted nodes, as sets of bits of groups, and their edges.
  """
  flow, n = choices.flow, len(choices.groups)
  of = {stage: g for g, some in enumerate(choices.groups) for stage in some}
  reach = np.eye(n, dtype=bool)
  for i, node in enumerate(flow.nodes):
    for v in node.reads:
      if v in flow.maker:
        reach[of[flow.nodes[flow.maker[v]].name], of[flow.nodes[i].name]] = True
  for k in range(n):
    reach |= reach[:, k : k + 1] & reach[k]
  both = reach & reach.T
  leaders = [g for g in range(n) if both[g].argmax() == g]
  leaders.sort(key=lambda g: reach[:, g].sum())
  parts = [sum(1 << int(g) for g in np.flatnonzero(both[h])) for h in leaders]
  edges = [
    (p, q)
    for p, g in enumerate(leaders)
    for q, h in enumerate(leaders)
    if p != q and reach[g, h]
  ]
  return parts, edges
