"""What a step of a plan takes, in simulation; and what its moves add to it."""

import dataclasses

import numpy as np

from planner.ir import plan as plan_lib
from planner.lower import program
from planner.search import choices as choices_lib
from planner.simulation import evaluate_plan


def simulate(
  choices: choices_lib.Choices, choice: choices_lib.Choice, ahead: int
) -> tuple[plan_lib.Plan, float]:
  """Returns a plan and the seconds that a step of it takes."""
  chosen = choices.plan(choice)
  uncut = dataclasses.replace(chosen, pieces=1)  # The flow is cut already.
  cut = choices.cuts[choice.pieces]
  return chosen, evaluate_plan.play(
    cut.flow, choices.known, uncut, ahead
  ).seconds


def moves(choices, choice):
  """What moves add at least: to edges, before or after nodes, to nodes."""
  cut, known = choices.cuts[choice.pieces], choices.known
  flow, places = cut.flow, list(choices.plan(choice).places.values())
  home = choices.place_of[choice.part]
  at = home[cut.group]
  adrift = {i for i, some in cut.loose.items() if len({*home[some]}) > 1}

  def move(v, source, target):
    return known.transfer(flow, v, places[source], places[target])

  delays = np.zeros((len(cut.floor.edges), 1))
  for e, (j, i) in enumerate(cut.floor.edges):
    if at[j] != at[i] and not adrift.intersection((j, i)):
      delays[e] = max(move(v, at[j], at[i]) for v in cut.carried[e])
  last, more = np.zeros((2, len(flow.nodes), 1))
  own = program.private(flow, choice.offload)
  for start, end in flow.carry:
    readers = flow.readers.get(start, ())
    if start == end or flow.maker.get(end, -1) in {-1, *adrift}:
      continue
    maker = flow.maker[end]
    for b in {at[i] for i in readers if i not in adrift} - {at[maker]}:
      last[maker] = np.maximum(last[maker], move(end, at[maker], b))
    here = at[maker] in {at[i] for i in readers}
    if start in own and here and not flow.nodes[maker].asynchronous:
      more[maker] += known.switch(flow, end, places[at[maker]])
  waits = [last]
  for loop in cut.floor.loops:
    first = np.zeros((len(flow.nodes), 1))
    for i in loop.readers if loop.steps == 1 else ():
      if at[i] != at[loop.end]:
        first[i] = move(loop.carried, at[loop.end], at[i])
    waits.append(first)
  idle = {*own, *own.values()}
  for i, node in enumerate(flow.nodes):
    if node.asynchronous:  # Its place moves that, and not who does it.
      continue
    for v in idle.intersection(node.reads):
      times = 1 + (own.get(v) == v)  # What stays leaves again.
      more[i] += times * known.switch(flow, v, places[at[i]])
  return delays, waits, more
