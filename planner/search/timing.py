"""What a step of a plan takes, in simulation; and what its moves add to it."""

import collections
import dataclasses
import itertools

import numpy as np

from planner import graph, passes
from planner import plan as plan_lib
from planner import simulate as simulate_lib
from planner.search import choices as choices_lib

STEPS = 8  # Simulated; the period is that of the second half.


class Cost:
  """A model's prices under a plan, as `planner.costs.cost.Cost`."""

  def __init__(self, choices: choices_lib.Choices, choice: choices_lib.Choice):
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


def simulate(
  choices: choices_lib.Choices, choice: choices_lib.Choice, ahead: int
) -> tuple[plan_lib.Plan, float]:
  """Returns a plan and the seconds that a step of it takes."""
  cost = Cost(choices, choice)
  chosen = choices.plan(choice)
  uncut = dataclasses.replace(chosen, pieces=1)  # The flow is cut already.
  flow, programs = passes.lower(cost.cut.flow, uncut, cost)
  steps = STEPS
  played = simulate_lib.simulate(flow, programs, cost, steps, ahead)
  return chosen, period(played)


def moves(choices, choice):
  """What moves add at least: to edges, before or after nodes, to nodes."""
  cost, cut = Cost(choices, choice), choices.cuts[choice.pieces]
  flow, sites = cut.flow, cost.sites
  home = choices.place_of[choice.part]
  at = home[cut.group]
  adrift = {i for i, some in cut.loose.items() if len({*home[some]}) > 1}
  delays = np.zeros((len(cut.floor.edges), 1))
  for e, (j, i) in enumerate(cut.floor.edges):
    if at[j] != at[i] and not adrift.intersection((j, i)):
      delays[e] = max(
        choices.transfer(cut, v, sites[at[j]], sites[at[i]])
        for v in cut.carried[e]
      )
  last, more = np.zeros((2, len(flow.nodes), 1))
  idle = set()
  for start, end in flow.carry:
    readers = flow.readers.get(start, ())
    names = {flow.nodes[i].name for i in readers}
    if names and names <= {*choice.evict}:
      idle |= {start, end}
    if start == end or flow.maker.get(end, -1) in {-1, *adrift}:
      continue
    maker = flow.maker[end]
    for b in {at[i] for i in readers if i not in adrift} - {at[maker]}:
      moved = choices.transfer(cut, end, sites[at[maker]], sites[b])
      last[maker] = np.maximum(last[maker], moved)
    if start in idle and at[maker] in {at[i] for i in readers}:
      more[maker] += cost.switch(flow, end, cost.names[at[maker]])
  waits = [last]
  for loop in cut.floor.loops:
    first = np.zeros((len(flow.nodes), 1))
    for i in loop.readers if loop.steps == 1 else ():
      if at[i] != at[loop.end]:
        first[i] = choices.transfer(
          cut, loop.carried, sites[at[loop.end]], sites[at[i]]
        )
    waits.append(first)
  stays = {start for start, end in flow.carry if start == end}
  for i, node in enumerate(flow.nodes):
    for v in idle.intersection(node.reads):
      times = 1 + (v in stays)  # What stays leaves again.
      more[i] += times * cost.switch(flow, v, cost.names[at[i]])
  return delays, waits, more
