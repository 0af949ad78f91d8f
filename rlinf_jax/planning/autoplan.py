"""Chooses a run's plan from costs measured on this machine, and keeps it true.

Stages are measured by `profile`, the fastest plan is searched for, and what it
is predicted to take is held against what it does take. Where the two part, the
model is corrected by what was seen and the search is made again.
"""

from collections.abc import Callable, Mapping
import dataclasses
import statistics
from typing import Any

import jax

from planner.costs import cost_table, roofline
from planner.costs import measured as measured_lib
from planner.counting import count
from planner.explain import overview
from planner.ir import graph
from planner.ir import plan as plan_lib
from planner.lower import program, unroll
from planner.search import exact
from planner.search import space as space_lib
from planner.simulation import evaluate_plan
from rlinf_jax.planning import machine_profile, stage_profile
from rlinf_jax.planning import profile_store as profile_store_lib
from sharding import rules as rules_lib

SECONDS = 10.0  # To search; what is then not proved is good enough to begin.
TRUE = 0.8, 1.25  # Measured over predicted, of a model that is left alone.
WINDOW = 8  # Steps whose medians are compared.
# `plan, cost -> places`, such as a `runtime.local.LocalRuntime`.
Settle = Callable[[plan_lib.Plan, cost_table.Priced], Any]
GAIN = 0.95  # Of the seconds now: a plan that takes less is worth the move.


@dataclasses.dataclass(frozen=True)
class Prediction:
  """What a step is expected to take.

  Attributes:
    step: seconds.
    stages: seconds of each, added over its calls in a step, and whether they
      were measured.
  """

  step: float
  stages: Mapping[str, measured_lib.Number]


@dataclasses.dataclass(frozen=True)
class Chosen:
  """A plan and why.

  Attributes:
    plan: of the stages of a step and of an evaluation.
    model: of the costs.
    space: that was searched.
    prediction: of the plan.
    gap: how much faster a plan of the space might still be, of 1; None if
      none was looked for.
  """

  plan: plan_lib.Plan
  model: roofline.Roofline
  space: exact.Space
  prediction: Prediction
  gap: float | None

  @property
  def cost(self) -> cost_table.Priced:
    """What decides who goes first where several stages could."""
    return cost_table.Priced(self.model, self.plan)


def plan(step, evaluate, ahead, model, space) -> Chosen:
  """Searches a space for the fastest plan.

  Raises:
    ValueError: if none fits in memory.
  """
  found = exact.search(step, model, space, ahead=ahead, seconds=SECONDS)
  if found.best is None:
    nearest = [f'The nearest: {words}.' for _, words in found.infeasible[:1]]
    raise ValueError(
      ' '.join(
        [
          f'No plan fits in the memory of {space.devices} devices.',
          *nearest,
          'Use more devices or a smaller batch, or bind a plan of your own.',
        ]
      )
    )
  best = _with_evaluation(found.best, step, evaluate)
  return Chosen(
    best, model, space, predict(step, ahead, model, best), found.gap
  )


def predict(flow, ahead, model, chosen: plan_lib.Plan) -> Prediction:
  """What a plan is expected to take, as simulated."""
  played = evaluate_plan.play(flow, model, chosen, ahead)
  spent = {}
  for found in overview.busy(played.flow, played.simulation).values():
    for name, seconds in found.items():
      spent[name] = spent.get(name, 0.0) + seconds
  tags = {}
  for node in played.flow.nodes:
    if not graph.is_plumbing(node):
      place = chosen.places[chosen.stages[node.name]]
      rows = chosen.micro_batch.get(node.name)
      tags[node.name] = model.explain(played.flow, node, place, rows).total.tag
  return Prediction(
    played.seconds,
    {
      name: measured_lib.Number(spent.get(name, 0.0), tag)
      for name, tag in tags.items()
    },
  )


def _with_evaluation(found, step, evaluate) -> plan_lib.Plan:
  """Stages of evaluations alone go where most of what they read lives."""
  rest = [name for name in evaluate.stages if name not in found.stages]
  homes = program.homes(step, found)
  held = dict.fromkeys(found.places, 0)
  starts = [start for start, _ in step.carry]
  for i, (start, _) in enumerate(evaluate.carry):
    if start in evaluate.readers:
      for place in homes[starts[i]]:
        held[place] += evaluate.values[start].bytes
  place = max(held, key=held.get)
  return dataclasses.replace(
    found, stages=dict(found.stages) | dict.fromkeys(rest, place)
  )


def told(step, chosen: Chosen) -> str:
  """A plan in a few words."""
  seconds = chosen.prediction.step
  proof = 'proved the fastest of its space'
  if chosen.gap is None:
    proof = 'as the run began'
  elif chosen.gap:
    proof = f'no plan of its space can be more than {chosen.gap:.0%} faster'
  said = overview.in_a_line(step, chosen.plan)
  return f'Plan: {said}; {seconds:.3g} s a step, {proof}.'


class Watch:
  """Holds what steps take against what was predicted.

  Attributes:
    chosen: the plan, as it is predicted by now.
  """

  def __init__(self, flows, ahead: int, chosen: Chosen, settle: Settle):
    """Begins with a plan.

    Args:
      flows: of a step and of an evaluation.
      ahead: steps that may overlap, the workflow's lag.
      chosen: the plan.
      settle: makes the places of a plan.
    """
    self._flows, self._ahead, self._settle = flows, ahead, settle
    self.chosen = chosen
    self._seen: list[tuple[float, Mapping[str, float]]] = []
    self._fresh = True  # The first step compiles.
    self._beside = 1.0  # How many times as long as stages explain.

  def runtime(self, timeline=None):
    """The places of the plan; they are given a state by who asks for them."""
    made = self._settle(self.chosen.plan, self.chosen.cost)
    made.timeline = timeline or made.timeline
    return made

  def told(self) -> str:
    """The plan in a few words."""
    return told(self._flows[0], self.chosen)

  def see(self, step: float, by_stage: Mapping[str, float]) -> Chosen | None:
    """Takes note of a step; returns a better plan once there is one.

    Args:
      step: its seconds.
      by_stage: those of each of its stages.
    """
    if self._fresh:
      self._fresh = False
      return None
    self._seen = [*self._seen, (step, by_stage)][-WINDOW:]
    if len(self._seen) < WINDOW:
      return None
    took = statistics.median(step for step, _ in self._seen)
    if _true(took / self.chosen.prediction.step / self._beside):
      return None
    factors = self._factors()
    self._seen.clear()
    better = None
    if not all(map(_true, factors.values())):
      better = self._again(factors)
    # What no stage explains, no other search would either.
    self._beside = 1.0 if better else took / self.chosen.prediction.step
    return better

  def _again(self, factors) -> Chosen | None:
    """Corrects the model by what was seen, and searches with it."""
    old = self.chosen
    model = old.model.knowing(old.model.measured.times(factors))
    step, evaluate = map(unroll.unroll, self._flows)
    space = space_lib.space(step, model)
    now = predict(step, self._ahead, model, old.plan)
    best = plan(step, evaluate, self._ahead, model, space)
    if best.prediction.step < GAIN * now.step:
      self.chosen, self._fresh = best, True
      return best
    fastest = (1 - best.gap) * best.prediction.step
    gap = max(0.0, 1 - fastest / now.step)
    self.chosen = Chosen(old.plan, model, space, now, gap)
    return None

  def _factors(self) -> dict[str, float]:
    """How many times as long as predicted each stage has taken."""
    factors = {}
    for name, predicted in self.chosen.prediction.stages.items():
      took = [by_stage.get(name, 0.0) for _, by_stage in self._seen]
      median = statistics.median(took)
      if predicted.value > 0 and median > 0:
        factors[name] = median / predicted.value
    return factors


def _true(ratio: float) -> bool:
  """Whether a model with such a ratio, measured over predicted, will do."""
  low, high = TRUE
  return low <= ratio <= high


def choose(
  flows: tuple[graph.Flow, graph.Flow],
  ahead: int,
  given,
  settle: Settle,
  keep: plan_lib.Plan | None = None,
  say: Callable[[str], None] = print,
) -> Watch:
  """Measures what matters, and finds the fastest plan.

  Args:
    flows: of a step and of an evaluation.
    ahead: steps that may overlap, the workflow's lag.
    given: state, batch and key, as arrays, to measure with; None where one
      device has no room for them, and costs are modeled alone.
    settle: makes the places of a plan.
    keep: the plan of a run that goes on; no other is looked for until steps
      are not as predicted.
    say: what prints.
  """
  # Loops are planned by their rounds, and run as loops.
  step, evaluate = map(unroll.unroll, flows)
  store = profile_store_lib.Store()
  model = roofline.Roofline(
    step, count.of_flow(step), machine_profile.here(store), rules_lib.DEFAULT
  )
  if given is None:
    say('Planning by modeled costs: one device cannot hold the state.')
  else:
    say('Measuring stages to plan by; what was measured once is remembered.')
    starts = (start for start, _ in step.carry)
    leaves = zip((*starts, *step.inputs), jax.tree.leaves(given), strict=True)
    model = model.knowing(
      stage_profile.measure(step, dict(leaves), model, store)
    )
  space = space_lib.space(step, model)
  if keep:
    prediction = predict(step, ahead, model, keep)
    chosen = Chosen(keep, model, space, prediction, gap=None)
  else:
    chosen = plan(step, evaluate, ahead, model, space)
  watch = Watch(flows, ahead, chosen, settle)
  say(watch.told())
  return watch
