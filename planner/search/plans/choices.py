"""Enumerates the plans of a space and memoizes their costs."""

from collections.abc import Mapping
import functools
import itertools
import math
from typing import NamedTuple

import numpy as np

from planner import formatting
from planner.ir import graph
from planner.ir import plan as plan_lib
from planner.search import deadline as deadline_lib
from planner.search import memo
from planner.search import pieces as pieces_lib
from planner.search.plans import fitting, grouping, residence

CHECKED = 1024  # Partitions between two looks at the clock.
SHOWN = 5  # Infeasible plans that are kept, the nearest to fitting first.


class Choice(NamedTuple):
  """A plan as numbers.

  Attributes:
    pieces: number of pieces that the batch passes in.
    part: index of a partition of the groups of stages into places.
    units: devices of each place, in units.
    axes: mesh axes of each place.
    executions: for each place, pairs of a stage and its micro-batch and remat.
    offload: stages whose carried values stay in host memory.
  """

  pieces: int
  part: int
  units: tuple[int, ...]
  axes: tuple
  executions: tuple
  offload: tuple[str, ...]


class Choices:
  """All plans of a space, with memoized costs.

  Attributes:
    groups: the groups of stages that share a place in every plan.
    blocks: for each partition, the groups of each place, as a set of bits.
    place_of: the place of each group in each partition, [partitions, groups].
    costs: the cost model, memoized.
    cuts: the flow in each number of pieces that it can be cut into, of those
      that there is time for.
    uncut: for each other number of pieces, the reason.
    units: all devices, in units.
    offloads: every subset of the stages that may be offloaded.
    infeasible: plans that need too much memory, the nearest to fitting first:
      bytes needed over bytes available, the plan, and a sentence.
    residence: what the places of each partition hold from step to step.
    deadline: when to stop; asked before each option of a place, and while
      partitions are listed. If it passes then, the list is not complete, and
      what asks next stops.
  """

  def __init__(self, flow, model, space, deadline=deadline_lib.NEVER):
    self.flow, self.model, self.space = flow, model, space
    self.deadline = deadline
    self.costs = memo.MemoizedModel(model)
    self.units = space.devices // space.unit
    self.groups = grouping.groups(flow, space.colocated)
    self.blocks, self.place_of = self._partitions()
    self.cuts, self.uncut = {}, {}
    for pieces in space.pieces:
      if self.cuts and deadline.has_passed:
        break
      try:
        self.cuts[pieces] = pieces_lib.CutFlow(
          flow,
          pieces,
          self.groups,
          dict(space.micro_batch),
          dict(space.remat),
        )
      except ValueError as error:
        self.uncut[pieces] = str(error)
    named = {*space.offload, *dict(space.micro_batch), *dict(space.remat)}
    unknown = sorted(named - {*flow.stages})
    if unknown:
      raise ValueError(
        f'The space has micro-batches, remat or offloads for {unknown}, which '
        f'are not among the stages {list(flow.stages)} of the flow.'
      )
    n = len(space.offload)
    self.offloads = [
      some
      for size in range(n + 1)
      for some in itertools.combinations(space.offload, size)
    ]
    self._starts = range(math.lcm(space.unit, model.alignment) // space.unit)
    self.infeasible = []
    self.stages = functools.cache(self._stages)
    self.menu = functools.cache(self._menu)
    self.smallest = functools.cache(self._smallest)
    self.group_axes = functools.cache(self._group_axes)
    self.largest = functools.cache(self._largest)
    self.residence = residence.Residence(flow, self._places)
    self._fits, self._possible, self._sizes = {}, {}, {}
    self._placements, self._columns, self._executions = {}, {}, {}

  # Places.

  def _partitions(self) -> tuple[list[tuple[int, ...]], np.ndarray]:
    """Returns `blocks` and `place_of`, all of them if there is time.

    The first partition, of a single place, is always among them.
    """
    space, n = self.space, len(self.groups)
    found, place_of = [], []
    partitions = grouping.partitions(n, space.max_places)
    for number, blocks in enumerate(partitions, 1):
      if len(blocks) >= space.min_places:
        found.append(blocks)
        places = enumerate(blocks)
        of = {g: b for b, block in places for g in range(n) if block >> g & 1}
        place_of.append([of[g] for g in range(n)])
      if not number % CHECKED and self.deadline.has_passed:
        break
    return found, np.array(place_of, int).reshape(-1, n)

  def _stages(self, block: int) -> tuple[str, ...]:
    """Returns the stages of a set of groups, in the order of the flow."""
    there = {
      stage
      for g, group in enumerate(self.groups)
      if block >> g & 1
      for stage in group
    }
    return tuple(stage for stage in self.flow.stages if stage in there)

  def _menu(self, block: int, units: int) -> tuple:
    """Returns the meshes that a place of some units may have."""
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
    """Returns the first unit of each place, the largest place first.

    So the sizes that are powers of two are aligned.
    """
    starts, at = [0] * len(units), 0
    for b in sorted(range(len(units)), key=lambda b: -units[b]):
      starts[b], at = at, at + units[b]
    return starts

  def _places(self, part: int) -> list[tuple[str, ...]]:
    """Returns the stages of each place of a partition."""
    return [self.stages(block) for block in self.blocks[part]]

  # Costs.

  def seconds(self, cut, kind: int, units: int, axes, execution) -> float:
    """Returns the least seconds of a kind of nodes, wherever a place begins."""
    node = cut.flow.nodes[cut.first[kind]]
    places = (self.placement(b, units, axes) for b in self._starts)
    seconds = (
      self.costs.seconds(cut.flow, node, p, *execution) for p in places
    )
    return min(seconds)

  def executions(self, cut, stage: str, units: int, axes):
    """Returns the executions of a stage that may fit in memory.

    Those are left out that need too much wherever other stages are.
    """
    some = cut.executions[stage]
    if self.model.capacity == np.inf or len(some) == 1:
      return some
    key = cut.pieces, stage, units, axes
    if key not in self._executions:
      self._executions[key] = tuple(
        execution
        for execution in some
        if self.least_memory(cut, stage, units, axes, execution)
        <= self.model.capacity
      )
    return self._executions[key]

  def least_memory(self, cut, stage: str, units: int, axes, execution) -> float:
    """Returns the bytes of a device that a stage needs in every plan."""
    placement = self.placement(0, units, axes)
    return self.model.least_memory(
      self.flow, self.largest(stage), placement, execution, cut.pieces
    )

  def _largest(self, stage: str) -> graph.Node:
    """Returns the call of a stage with the most rows."""
    calls = (node for node in self.flow.nodes if node.name == stage)
    return max(calls, key=self.flow.rows_of)

  def column(self, cut, *option) -> np.ndarray:
    """Returns seconds of nodes on `(block, units, axes, executions)`, [N].

    Nodes of other places have zero.
    """
    key = cut.pieces, *option
    if key not in self._columns:
      self.deadline.check()
      self._columns[key] = self._column(cut, *option)
    return self._columns[key]

  def _column(self, cut, block: int, units: int, axes, some) -> np.ndarray:
    some, out = dict(some), np.zeros(len(cut.first))
    for k, i in enumerate(cut.first):
      if block >> int(cut.group[i]) & 1 and i not in cut.floating:
        name = cut.flow.nodes[i].name
        plumbing = graph.is_plumbing(cut.flow.nodes[i])
        execution = plan_lib.Execution() if plumbing else some[name]
        out[k] = self.seconds(cut, k, units, axes, execution)
    return out[cut.kind]

  def table(self, cut) -> np.ndarray:
    """Returns the least seconds of every node by its units, [N, units + 1]."""
    least = np.full((len(cut.first), self.units + 1), np.inf)
    for units in range(1, self.units + 1):
      self.deadline.check()
      axes = self.group_axes(units)
      for k, i in enumerate(cut.first):
        node = cut.flow.nodes[i]
        if i in cut.floating:
          least[k, units] = 0.0
          continue
        for mesh in axes[cut.group[i]]:
          some = (plan_lib.Execution(),)
          if not graph.is_plumbing(node):
            some = self.executions(cut, node.name, units, mesh)
          for execution in some:
            spent = self.seconds(cut, k, units, mesh, execution)
            least[k, units] = min(least[k, units], spent)
    return least[cut.kind]

  def _group_axes(self, units: int) -> list[set]:
    """Returns the meshes that the place of each group of stages may have."""
    found = [set() for _ in self.groups]
    for block in {block for blocks in self.blocks for block in blocks}:
      for g in range(len(self.groups)):
        if block >> g & 1:
          found[g].update(self.menu(block, units))
    return found

  # Plans.

  def names(self, choice: Choice) -> list[str]:
    """Names each place after the stage that it spends most time on."""
    cut, names = self.cuts[choice.pieces], []
    blocks = self.blocks[choice.part]
    if len(blocks) == 1:
      return ['all']
    for b, block in enumerate(blocks):
      spent = dict.fromkeys(self.stages(block), 0.0)
      column = self.column(
        cut, block, choice.units[b], choice.axes[b], choice.executions[b]
      )
      for node, seconds in zip(cut.flow.nodes, column, strict=True):
        if node.name in spent:
          spent[node.name] += seconds
      names.append(max(spent, key=spent.get))
    return names

  def plan(self, choice: Choice, names=None) -> plan_lib.Plan:
    names = names or self.names(choice)
    blocks = self.blocks[choice.part]
    places = zip(
      self.starts(choice.units), choice.units, choice.axes, strict=True
    )
    some = dict(itertools.chain(*choice.executions))
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
      micro_batch={s: x.rows for s, x in some.items() if x.rows is not None},
      pieces=choice.pieces,
      offload=choice.offload,
      remat={
        s: x.remat for s, x in some.items() if x.remat != plan_lib.STORE_ALL
      },
    )

  # Memory.

  def overflows(self, choice: Choice) -> bool:
    """Whether a place needs more memory than there is; records it if so."""
    if self.model.capacity == np.inf:
      return False
    needs = [
      max(self.memory(choice, b).values()) for b in range(len(choice.units))
    ]
    over = [b for b, need in enumerate(needs) if need > self.model.capacity]
    for b in over:
      self.note(choice, b, needs[b])
    return bool(over)

  def memory(self, choice: Choice, b: int) -> Mapping[str, float]:
    """Returns the bytes on a device of a place while each of its nodes runs."""
    names = [stages[0] for stages in self._places(choice.part)]
    return self.model.memory(self.flow, self.plan(choice, names), names[b])

  def note(self, choice, b, need):
    """Keeps a plan that does not fit, if it is among the nearest."""
    there = self.model.capacity
    excess = need / there if there > 0 else need
    if len(self.infeasible) == SHOWN and excess >= self.infeasible[-1][0]:
      return
    place, devices = self.names(choice)[b], choice.units[b] * self.space.unit
    words = (
      f'{place} needs {formatting.byte_size(need)} on each of its {devices} '
      f'devices > {formatting.byte_size(there)} that may be used: '
      f'{excess - 1:.1%} too much'
    )
    if words in (other for _, _, other in self.infeasible):
      return
    self.infeasible.append((excess, self.plan(choice), words))
    self.infeasible.sort(key=lambda item: item[0])
    del self.infeasible[SHOWN:]

  def fitting(self, cut, part: int, b: int, units: int, offload):
    """Returns the axes and executions with which a place fits in memory.

    Memory does not depend on the sizes and options of other places.
    """
    blocks = self.blocks[part]
    key = cut.pieces, blocks[b], self.residence.homes(part)[b], units, offload
    if key not in self._fits:
      sizes = [self.smallest(other) for other in blocks]
      sizes[b] = units
      if None in sizes or sum(sizes) > self.units:
        return []  # There is no such plan.
      menus = [self.menu(*place) for place in zip(blocks, sizes, strict=True)]
      axes = [menu[0] if menu else () for menu in menus]
      some = tuple(self._first(cut, block) for block in blocks)
      fits = []
      for mesh in menus[b]:
        self.deadline.check()
        axes[b] = mesh
        choice = Choice(
          cut.pieces, part, tuple(sizes), tuple(axes), some, offload
        )
        found = fitting.fastest(self, cut, choice, b)
        if found is not None:
          fits.append((mesh, found))
      self._fits[key] = fits
    return self._fits[key]

  def _first(self, cut, block: int) -> tuple:
    """Returns the first execution of each stage of a place."""
    return tuple((s, cut.executions[s][0]) for s in self.stages(block))

  def _smallest(self, block: int):
    sizes = range(1, self.units + 1)
    return next((units for units in sizes if self.menu(block, units)), None)

  def possible(self, cut, part: int, b: int, units: int) -> bool:
    """Whether a place may have `units` units."""
    key = cut.pieces, part, b
    if key not in self._possible:
      blocks = self.blocks[part]
      others = [self.smallest(x) for i, x in enumerate(blocks) if i != b]
      most = 0 if None in others else self.units - sum(others)
      # Partitions whose place has the same stages and values share a table.
      same = cut.pieces, blocks[b], self.residence.homes(part)[b]
      self._possible[key] = most, self._sizes.setdefault(same, {})
    most, sizes = self._possible[key]
    if units > most:
      return False
    if units not in sizes:
      sizes[units] = bool(self.menu(self.blocks[part][b], units)) and any(
        self.fitting(cut, part, b, units, offload) for offload in self.offloads
      )
    return sizes[units]
