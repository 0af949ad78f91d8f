"""The plans of a declared space, and what a model says of each."""

import collections
import functools
import itertools
from typing import NamedTuple

import numpy as np

from planner import cut as cut_lib
from planner import floor, graph, listing, program
from planner import plan as plan_lib
from planner import simulate as simulate_lib

STEPS = 8  # Simulated; the period is that of the second half.
SHOWN = 5  # Infeasible plans that are kept, nearest to feasible first.


def partitions(n: int, most: int):
  """Ways to part `n` things among at most `most` places, as sets of bits."""

  def grow(i, blocks):
    if i == n:
      yield blocks
      return
    for b, block in enumerate(blocks):
      yield from grow(i + 1, (*blocks[:b], block | 1 << i, *blocks[b + 1 :]))
    if len(blocks) < most:
      yield from grow(i + 1, (*blocks, 1 << i))

  yield from grow(0, ())


class Choice(NamedTuple):
  """A plan, as numbers.

  Attributes:
    pieces: of the batch.
    part: which partition of the groups of stages.
    units: devices of each place, in units.
    axes: of each place.
    rows: of each place, pairs of a stage and its rows; None for all.
    evict: stages whose carried values wait in host memory.
  """

  pieces: int
  part: int
  units: tuple[int, ...]
  axes: tuple
  rows: tuple
  evict: tuple[str, ...]


class Cut:
  """A flow in pieces.

  Attributes:
    flow: the cut flow.
    number: of each node, by identity: they outlive being put in order.
    group: the group of stages at whose place each node runs.
    rows: rows at a time that each stage may take.
    floor: bounds of the flow.
    carried: values read along each edge of `floor`.
  """

  def __init__(self, flow, pieces, groups, rows):
    self.pieces = pieces
    self.flow = cut_lib.cut(flow, pieces)
    self.number = {id(node): i for i, node in enumerate(self.flow.nodes)}
    of = {stage: g for g, group in enumerate(groups) for stage in group}
    where = program.locate(self.flow, apart([(s,) for s in flow.stages]))
    self.group = np.array([of[stage] for stage in where])
    self.rows = {s: self._fitting(s, rows.get(s, (None,))) for s in flow.stages}
    self.floor = floor.Floor(self.flow)
    self.carried = [
      set(self.flow.nodes[j].writes).intersection(self.flow.nodes[i].reads)
      for j, i in self.floor.edges
    ]

  def _fitting(self, stage, options):
    fit, why = [], None
    for rows in options:
      taken = {} if rows is None else {stage: rows}
      try:
        program.check_rows(self.flow, apart([(stage,)], taken))
        fit.append(rows)
      except ValueError as error:
        why = error
    if not fit:
      raise why
    return tuple(fit)


def apart(groups, rows=()) -> plan_lib.Plan:
  """A plan with a device for each group, to ask where things would be."""
  return plan_lib.Plan(
    {group[0]: plan_lib.Placement((i,)) for i, group in enumerate(groups)},
    {stage: group[0] for group in groups for stage in group},
    rows=dict(rows),
  )


class Choices:
  """All plans of a space, priced once each.

  Attributes:
    groups: stages that share a place whatever the plan.
    blocks: of each partition, the groups of each place, as sets of bits.
    cuts: the flow in each number of pieces that it can be cut into.
    units: devices there are, in units.
    infeasible: plans that need too much memory, nearest to feasible first:
      how many times what there is, the plan, in words.
  """

  def __init__(self, flow, model, space):
    self.flow, self.model, self.space = flow, model, space
    self.units = space.devices // space.unit
    self.groups = groups(flow, space.together)
    self.blocks = list(partitions(len(self.groups), space.places))
    self.place_of = np.zeros((len(self.blocks), len(self.groups)), int)
    for p, blocks in enumerate(self.blocks):
      for b, block in enumerate(blocks):
        for g in range(len(self.groups)):
          if block >> g & 1:
            self.place_of[p, g] = b
    self.cuts, self.uncut = {}, {}
    for pieces in space.pieces:
      try:
        self.cuts[pieces] = Cut(flow, pieces, self.groups, dict(space.rows))
      except ValueError as error:
        self.uncut[pieces] = str(error)
    n = len(space.evict)
    self.evictions = [
      some
      for size in range(n + 1)
      for some in itertools.combinations(space.evict, size)
    ]
    self.infeasible = []
    self.stages = functools.cache(self._stages)
    self.menu = functools.cache(self._menu)
    self.smallest = functools.cache(self._smallest)
    self._seconds, self._moves, self._placements = {}, {}, {}
    self._fits, self._possible, self._homes = {}, {}, {}

  # What there is.

  def _stages(self, block: int) -> tuple[str, ...]:
    """Of a set of groups, in the order of the flow."""
    there = {
      stage
      for g, group in enumerate(self.groups)
      if block >> g & 1
      for stage in group
    }
    return tuple(stage for stage in self.flow.stages if stage in there)

  def _menu(self, block: int, units: int) -> tuple:
    """Meshes that a place may have."""
    devices = units * self.space.unit
    menu = self.model.axes(self.stages(block), devices)
    return tuple(tuple(map(tuple, axes)) for axes in menu)

  def placement(self, start: int, units: int, axes) -> plan_lib.Placement:
    key = start, units, axes
    if key not in self._placements:
      first = start * self.space.unit
      devices = range(first, first + units * self.space.unit)
      self._placements[key] = plan_lib.Placement(tuple(devices), axes)
    return self._placements[key]

  def starts(self, units) -> list[int]:
    """The first unit of each place: large places first, for they align."""
    starts, at = [0] * len(units), 0
    for b in sorted(range(len(units)), key=lambda b: -units[b]):
      starts[b], at = at, at + units[b]
    return starts

  def options(self, cut, block: int, units: int):
    """Axes and rows that a place may have."""
    rows = [
      [(stage, rows) for rows in cut.rows[stage]]
      for stage in self.stages(block)
    ]
    menu = self.menu(block, units)
    return list(itertools.product(menu, map(tuple, itertools.product(*rows))))

  # What it costs.

  def seconds(self, cut, i: int, units: int, axes, rows) -> float:
    """Of a node."""
    key = cut.pieces, i, units, axes, rows
    if key not in self._seconds:
      self._seconds[key] = self.model.seconds(
        cut.flow, cut.flow.nodes[i], self.placement(0, units, axes), rows
      )
    return self._seconds[key]

  def transfer(self, cut, value: int, source, target) -> float:
    """Between two places, each `(start, units, axes)`."""
    key = cut.pieces, value, source, target
    if key not in self._moves:
      self._moves[key] = self.model.transfer(
        cut.flow, value, self.placement(*source), self.placement(*target)
      )
    return self._moves[key]

  def column(self, cut, block: int, units: int, axes, rows) -> np.ndarray:
    """Seconds of every node; zero of those that are elsewhere."""
    rows, out = dict(rows), np.zeros(len(cut.flow.nodes))
    for i, g in enumerate(cut.group):
      if block >> int(g) & 1:
        name = cut.flow.nodes[i].name
        plumbing = graph.is_plumbing(cut.flow.nodes[i])
        taken = None if plumbing else rows[name]
        out[i] = self.seconds(cut, i, units, axes, taken)
    return out

  def table(self, cut) -> np.ndarray:
    """The least seconds of every node on so many units, [N, units + 1]."""
    least = np.full((len(cut.flow.nodes), self.units + 1), np.inf)
    with_group = [
      {block for blocks in self.blocks for block in blocks if block >> g & 1}
      for g in range(len(self.groups))
    ]
    for units in range(1, self.units + 1):
      axes = [
        {axes for block in blocks for axes in self.menu(block, units)}
        for blocks in with_group
      ]
      for i, node in enumerate(cut.flow.nodes):
        plumbing = graph.is_plumbing(node)
        for rows in (None,) if plumbing else cut.rows[node.name]:
          for mesh in axes[cut.group[i]]:
            spent = self.seconds(cut, i, units, mesh, rows)
            least[i, units] = min(least[i, units], spent)
    return least

  # Plans.

  def names(self, choice: Choice) -> list[str]:
    """Each place is called after the stage that it spends longest on."""
    cut, names = self.cuts[choice.pieces], []
    blocks = self.blocks[choice.part]
    if len(blocks) == 1:
      return ['all']
    for b, block in enumerate(blocks):
      spent = dict.fromkeys(self.stages(block), 0.0)
      column = self.column(
        cut, block, choice.units[b], choice.axes[b], choice.rows[b]
      )
      for node, seconds in zip(cut.flow.nodes, column, strict=True):
        if node.name in spent:
          spent[node.name] += seconds
      names.append(max(spent, key=spent.get))
    return names

  def plan(self, choice: Choice) -> plan_lib.Plan:
    names = self.names(choice)
    blocks = self.blocks[choice.part]
    places = zip(
      self.starts(choice.units), choice.units, choice.axes, strict=True
    )
    rows = dict(itertools.chain(*choice.rows))
    return plan_lib.Plan(
      {
        name: self.placement(*place)
        for name, place in zip(names, places, strict=True)
      },
      {
        stage: name
        for name, block in zip(names, blocks, strict=True)
        for stage in self.stages(block)
      },
      rows={stage: n for stage, n in rows.items() if n is not None},
      pieces=choice.pieces,
      evict=choice.evict,
    )

  # Memory.

  def homes(self, part: int):
    """The carried values that each place of a partition holds."""
    if part not in self._homes:
      blocks = [self.stages(block) for block in self.blocks[part]]
      held = program.homes(self.flow, apart(blocks))
      self._homes[part] = [
        frozenset(v for v, places in held.items() if stages[0] in places)
        for stages in blocks
      ]
    return self._homes[part]

  def overflows(self, choice: Choice, only=None) -> bool:
    """Whether a place needs more memory than there is; it is noted then."""
    chosen, over = self.plan(choice), False
    for b, place in enumerate(chosen.places):
      if only in (None, b):
        need = self.model.memory(self.flow, chosen, place)
        if need > self.model.capacity:
          over = True
          self._note(chosen, place, need)
    return over

  def _note(self, chosen, place, need):
    there = self.model.capacity
    excess = need / there if there > 0 else need
    words = (
      f'{place} needs {listing.size(need)} on each of its '
      f'{len(chosen.places[place].devices)} devices > {listing.size(there)} '
      'that may be used'
    )
    if len(self.infeasible) < SHOWN or excess < self.infeasible[-1][0]:
      self.infeasible.append((excess, chosen, words))
      self.infeasible.sort(key=lambda item: item[0])
      del self.infeasible[SHOWN:]

  def fitting(self, cut, part: int, b: int, units: int, evict):
    """The options of a place that fit in memory, whatever others look like."""
    blocks = self.blocks[part]
    block, held = blocks[b], self.homes(part)[b]
    key = cut.pieces, block, held, units, evict
    if key not in self._fits:
      sizes = [self.smallest(other) for other in blocks]
      sizes[b] = units
      if None in sizes or sum(sizes) > self.units:
        return []  # There is no such plan.
      given = [
        self.options(cut, other, size)[:1]
        for other, size in zip(blocks, sizes, strict=True)
      ]
      self._fits[key] = fits = []
      for option in self.options(cut, block, units):
        given[b] = [option]
        axes, rows = zip(*(options[0] for options in given), strict=True)
        choice = Choice(cut.pieces, part, tuple(sizes), axes, rows, evict)
        if not self.overflows(choice, b):
          fits.append(option)
    return self._fits[key]

  def _smallest(self, block: int):
    sizes = range(1, self.units + 1)
    return next((units for units in sizes if self.menu(block, units)), None)

  def possible(self, cut, part: int, b: int, units: int) -> bool:
    """Whether a place may have that size."""
    key = cut.pieces, part, b, units
    if key not in self._possible:
      self._possible[key] = bool(self.menu(self.blocks[part][b], units)) and (
        any(
          self.fitting(cut, part, b, units, evict) for evict in self.evictions
        )
      )
    return self._possible[key]


class Cost:
  """A model's prices under a plan, as `planner.cost.Cost`."""

  def __init__(self, choices: Choices, choice: Choice):
    self.choices, self.cut = choices, choices.cuts[choice.pieces]
    self.names = choices.names(choice)
    starts = choices.starts(choice.units)
    self.sites = list(zip(starts, choice.units, choice.axes, strict=True))
    self.place = dict(zip(self.names, self.sites, strict=True))
    self.rows = dict(itertools.chain(*choice.rows))

  def seconds(self, flow, node, place):
    del flow
    _, units, axes = self.place[place]
    rows = None if graph.is_plumbing(node) else self.rows[node.name]
    number = self.cut.number[id(node)]
    return self.choices.seconds(self.cut, number, units, axes, rows)

  def transfer(self, flow, value, source, target):
    del flow
    source, target = self.place[source], self.place[target]
    if source == target:
      return 0.0
    return self.choices.transfer(self.cut, value, source, target)

  def switch(self, flow, value, place):
    placement = self.choices.placement(*self.place[place])
    return self.choices.model.switch(flow, value, placement)


def period(simulation: simulate_lib.Simulation) -> float:
  """Seconds from step to step: as simulated, and no less than there is to do.

  A few steps may not show what a place that falls behind will cost in the end.
  """
  busy = collections.Counter()
  for span in simulation.spans:
    if span.step == 0 and span.what != 'wait':
      busy[span.place] += span.end - span.start
  return max([simulation.period, *busy.values()])


def groups(flow, together) -> list[tuple[str, ...]]:
  """Stages by which share a place, in the order of the flow.

  Raises:
    ValueError: for stages that the flow does not have.
  """
  strange = sorted({s for some in together for s in some} - {*flow.stages})
  if strange:
    raise ValueError(
      f'The space puts {strange} together, which are not among the stages '
      f'{list(flow.stages)} of the flow.'
    )
  leader = {stage: stage for stage in flow.stages}
  for some in together:
    joined = {leader[stage] for stage in some}
    first = next(s for s in flow.stages if leader[s] in joined)
    for stage in flow.stages:
      if leader[stage] in joined:
        leader[stage] = first
  members = collections.defaultdict(list)
  for stage in flow.stages:
    members[leader[stage]].append(stage)
  return [tuple(members[s]) for s in flow.stages if s in members]
