"""Simulates a plan, and bounds the time that its transfers add."""

import dataclasses

import numpy as np

from planner.ir import plan as plan_lib
from planner.lower import offloading
from planner.search.plans import choices as choices_lib
from planner.simulation import evaluate_plan


def simulate(
  choices: choices_lib.Choices, choice: choices_lib.Choice, staleness: int
) -> tuple[plan_lib.Plan, float]:
  """Simulates a plan; returns it with the seconds of a step."""
  chosen = choices.plan(choice)
  uncut = dataclasses.replace(chosen, pieces=1)  # The flow is cut already.
  cut = choices.cuts[choice.pieces]
  return chosen, evaluate_plan.evaluate(
    cut.flow, choices.costs, uncut, staleness
  ).seconds


def moves(choices, choice, share: float):
  """Returns lower bounds on the time that moves add to a plan.

  Args:
    choices: that the plan is one of.
    choice: the plan.
    share: share of a step that passes before the next one begins.

  Returns:
    Seconds added to each edge, [E, 1]; seconds to wait after each node before
    the step ends, then for each loop before each node, a list of [N, 1]; and
    seconds added to each node, [N, 1].
  """
  cut, costs = choices.cuts[choice.pieces], choices.costs
  flow, places = cut.flow, list(choices.plan(choice).places.values())
  home = choices.place_of[choice.part]
  at = home[cut.group]
  floating = {i for i, some in cut.floating.items() if len({*home[some]}) > 1}

  held = choices.residence.held(choice.part)

  def move(v, source, target):
    v = held[target].get(v, v)
    return costs.transfer(flow, v, places[source], places[target])

  delays = np.zeros((len(cut.bounds.edges), 1))
  for e, (j, i) in enumerate(cut.bounds.edges):
    if at[j] != at[i] and not floating.intersection((j, i)):
      delays[e] = max(move(v, at[j], at[i]) for v in cut.carried[e])
  last, more = np.zeros((2, len(flow.nodes), 1))
  own = offloading.private(flow, choice.offload)
  for start, end in flow.carry:
    readers = flow.readers.get(start, ())
    if start == end or flow.maker.get(end, -1) in {-1, *floating}:
      continue
    maker = flow.maker[end]
    for b in {at[i] for i in readers if i not in floating} - {at[maker]}:
      last[maker] = np.maximum(last[maker], move(end, at[maker], b))
    here = at[maker] in {at[i] for i in readers}
    if start in own and here and not flow.nodes[maker].asynchronous:
      more[maker] += costs.switch(flow, end, places[at[maker]])
  waits = [last]
  for loop in cut.bounds.loops_beside(share):
    first = np.zeros((len(flow.nodes), 1))
    for i in loop.readers if loop.steps == 1 else ():
      if at[i] != at[loop.end]:
        first[i] = move(loop.carried, at[loop.end], at[i])
    waits.append(first)
  idle = {*own, *own.values()}
  for i, node in enumerate(flow.nodes):
    if (
      node.asynchronous
    ):  # The place moves its values, not the background worker.
      continue
    for v in idle.intersection(node.reads):
      times = 1 + (
        own.get(v) == v
      )  # An unchanged value is restored and offloaded.
      more[i] += times * costs.switch(flow, v, places[at[i]])
  for i, pairs in offloading.streamed(flow, choice.offload).items():
    for v in {*pairs, *pairs.values()} - idle:  # Between two updates.
      more[i] += costs.switch(flow, v, places[at[i]])
  return delays, waits, more
