"""RLinf's Algorithm 1 (arXiv:2509.15965): plans by cutting the graph in two.

Of a graph of stages, whose cycles are taken for one stage each, either all
share a place and run one after another, or the graph is cut in two, the first
part on some of the devices and the second on the rest, both in a pipeline:

  T = T_critical + (M / m − 1) · T_bottleneck

for a batch of M rows of which m pass at a time. Every cut that no edge crosses
backwards is tried, with every way to share out the devices, and the fastest
way of every part is remembered.

In the paper a part that is cut again may also take turns with another on the
same devices. Here a device belongs to one place, so turns are taken by stages
of one place, and whether their states must leave the devices meanwhile is a
question of memory: the first offloads with which a place fits are taken.
"""

import itertools
from typing import NamedTuple

import numpy as np

from planner.ir import graph
from planner.lower import program
from planner.search import choices as choices_lib
from planner.search import exact, timing


class _Way(NamedTuple):
  """How to run a part of the graph, for every number of units, [units + 1].

  Attributes:
    critical: seconds that the first piece takes from end to end.
    bottleneck: seconds that the slowest place takes for a piece.
    blocks: the groups of each place, and units of it, of each entry.
  """

  critical: np.ndarray
  bottleneck: np.ndarray
  blocks: list


def algorithm1(
  flow: graph.Flow,
  model: exact.Model,
  space: exact.Space,
  *,
  ahead: int = 0,
  keep: int = 5,
) -> exact.Found:
  """Returns the plan that Algorithm 1 thinks fastest, as simulated.

  Args:
    flow: as recorded.
    model: of the costs.
    space: of the plans.
    ahead: as in `exact.search`; the algorithm does not know of it.
    keep: how many plans to return: the best of each number of pieces.
  """
  choices = choices_lib.Choices(flow, model, space)
  best, ranked, tried = None, [], 0
  for cut in choices.cuts.values():
    made = _Algorithm(choices, cut)
    estimate, choice = made.best()
    tried += made.tried
    if choice is None or choices.overflows(choice):
      continue
    found = timing.simulate(choices, choice, ahead)
    ranked.append(found)
    if best is None or estimate < best[0]:
      best = estimate, *found
  ranked.sort(key=lambda pair: pair[1])
  return exact.Found(
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


class _Algorithm:
  """The algorithm for one number of pieces.

  Attributes:
    parts: sets of groups, as bits, that are one in the graph without cycles.
    edges: pairs of such parts.
    known: the fastest ways of what has been asked for.
  """

  def __init__(self, choices, cut):
    self.choices, self.cut, self.tried = choices, cut, 0
    self.parts, self.edges = _without_cycles(choices)
    self.known, self.kinds, self.alone = {}, {}, {}

  def best(self):
    """The seconds that the algorithm expects, and the plan."""
    way = self.ways(range(len(self.parts)), self.choices.space.places)
    seconds = self.expected(way.critical, way.bottleneck)
    units = int(np.argmin(seconds))
    if seconds[units] == np.inf:
      return np.inf, None
    return seconds[units], self.choice(way.blocks[units])

  def expected(self, critical, bottleneck):
    more = self.cut.pieces - 1
    return critical + more * bottleneck if more else critical

  def ways(self, parts, places: int) -> _Way:
    """The fastest ways of some parts on at most so many places."""
    key = frozenset(parts), places
    if key not in self.known:
      self.known[key] = self._ways(sorted(parts), places)
    return self.known[key]

  def _ways(self, parts, places) -> _Way:
    way = self.one_place(sum(self.parts[p] for p in parts))
    if places == 1 or len(parts) == 1:
      return way
    best = self.expected(way.critical, way.bottleneck)
    critical, bottleneck = way.critical.copy(), way.bottleneck.copy()
    blocks = list(way.blocks)
    n = self.choices.units
    for first in self._first_parts(parts):
      rest = [p for p in parts if p not in first]
      for mine in range(1, places):
        one, other = self.ways(first, mine), self.ways(rest, places - mine)
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
    return _Way(critical, bottleneck, blocks)

  def _first_parts(self, parts):
    """Sets of parts that read nothing of the others: all cuts."""
    for size in range(1, len(parts)):
      for first in itertools.combinations(parts, size):
        if not any(
          j not in first and j in parts and i in first for j, i in self.edges
        ):
          yield first

  def one_place(self, block: int) -> _Way:
    """One after another on all devices, if that fits."""
    if block not in self.alone:
      n = self.choices.units
      piece = np.full(n + 1, np.inf)
      for units in range(1, n + 1):
        if found := self.fastest(block, units):
          piece[units] = found[0] / self.cut.pieces
      blocks = [((block, units),) for units in range(n + 1)]
      self.alone[block] = _Way(piece, piece, blocks)
    return self.alone[block]

  def fastest(self, block: int, units: int):
    """The seconds of a place, its options, and offloads; None if none fits."""
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
    """A partition with that place, as few others as there can be."""
    if block not in self.kinds:
      self.kinds[block] = next(
        (part, blocks.index(block))
        for part, blocks in sorted(
          enumerate(self.choices.blocks), key=lambda pair: len(pair[1])
        )
        if block in blocks
      )
    return self.kinds[block]

  def switches(self, block: int, units: int, axes, offload) -> float:
    """Seconds of moving what is offloaded away and back once a step."""
    flow, model = self.choices.flow, self.choices.model
    placement = self.choices.placement(0, units, axes)
    stages = set(offload).intersection(self.choices.stages(block))
    return sum(
      2 * model.switch(flow, start, placement)
      for start in program.private(flow, stages)
    )

  def choice(self, blocks) -> choices_lib.Choice:
    """The places that the algorithm has chosen, as a plan."""
    blocks = sorted(blocks, key=lambda pair: pair[0] & -pair[0])
    part = self.choices.blocks.index(tuple(block for block, _ in blocks))
    found = [self.fastest(block, units) for block, units in blocks]
    offload = {stage for _, _, some in found for stage in some}
    axes, rows = zip(*(option for _, option, _ in found), strict=True)
    return choices_lib.Choice(
      self.cut.pieces,
      part,
      tuple(units for _, units in blocks),
      axes,
      rows,
      tuple(s for s in self.choices.space.offload if s in offload),
    )


def _without_cycles(choices):
  """Groups that reach each other as one, in an order that respects edges."""
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
