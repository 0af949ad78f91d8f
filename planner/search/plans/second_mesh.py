"""Plans in which two meshes take turns on the devices of a place.

A search gives every place one mesh. Generation wants another one than training,
which gathers parameters layer by layer. Here it gets its own on the same
devices. The values of the place that waits are in host memory meanwhile, and
the simulation counts their way there and back.
"""

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import itertools
from typing import NamedTuple

import numpy as np

from planner.costs.decoding import decode
from planner.ir import graph
from planner.ir import plan as plan_lib
from planner.search import deadline as deadline_lib
from planner.search import pieces
from planner.search.plans import fitting
from planner.search.plans import space as space_lib
from planner.simulation import evaluate_plan

MOST = 16  # Pairs of meshes of a place that are simulated.
NAME = 'generation'  # Of the place with the second mesh.


class Half(NamedTuple):
  """Some stages of a place on a mesh of their own.

  Attributes:
    placement: the devices of the place, with this mesh.
    executions: those that each stage may have there, the fastest first.
    seconds: of all calls of the stages by their fastest executions.
  """

  placement: plan_lib.Placement
  executions: dict[str, list[plan_lib.Execution]]
  seconds: float


def fastest(
  flow: graph.Flow,
  model,
  space: space_lib.Space,
  ranked: Sequence[tuple[plan_lib.Plan, float]],
  *,
  staleness: int = 0,
  deadline: deadline_lib.Deadline = deadline_lib.NEVER,
  allowed: Callable[[plan_lib.Plan], bool] = lambda plan: True,
) -> tuple[plan_lib.Plan, float] | None:
  """Gives generation a mesh of its own in some plans.

  Of each place, the pairs of meshes whose stages take least time are simulated.
  So a faster pair may be missed, but none is chosen that is not faster.

  Args:
    flow: as recorded.
    model: the cost model, a `roofline.Roofline`.
    space: the executions that stages may have.
    ranked: plans and their seconds, the fastest first.
    staleness: as in the search for them.
    deadline: of all simulations together.
    allowed: whether a plan may be taken.

  Returns:
    The fastest such plan and its seconds; None if none was found that is faster
    than all of `ranked`.
  """
  best, limit = None, min((seconds for _, seconds in ranked), default=0.0)
  cuts, tried = {}, set()
  try:
    for plan, _ in ranked:
      if plan.pieces not in cuts:
        cuts[plan.pieces] = pieces.CutFlow(
          flow,
          plan.pieces,
          [(stage,) for stage in flow.stages],
          dict(space.micro_batch),
          dict(space.remat),
        )
      for place in () if plan.shared_devices else plan.places:
        if (same := _all_but_its_mesh(plan, place)) in tried:
          continue
        tried.add(same)
        for halves in _halves(model, cuts[plan.pieces], plan, place):
          deadline.check()
          # They are on the same devices, one after the other.
          if sum(half.seconds for half in halves) >= limit:
            break
          candidate = _joined(flow, model, plan, place, halves)
          if candidate is None or not allowed(candidate):
            continue
          found = evaluate_plan.evaluate(flow, model, candidate, staleness)
          if found.seconds < limit:
            best, limit = (candidate, found.seconds), found.seconds
  except deadline_lib.TimeUp:
    pass
  return best


def _all_but_its_mesh(plan, place: str) -> tuple:
  """Returns all of a plan that giving a place other meshes leaves as it is."""
  return (
    plan.pieces,
    plan.offload,
    tuple(plan.stages.items()),
    tuple(
      (name, other.devices, name == place or other.axes)
      for name, other in plan.places.items()
    ),
    tuple(
      (stage, plan.execution(stage))
      for stage, other in plan.stages.items()
      if other != place
    ),
  )


def _halves(model, cut, plan, place: str) -> list[tuple[Half, Half]]:
  """Returns both halves of a place on pairs of meshes, the fastest first.

  The second half generates. There is none if a place has no other stages, or
  one device.
  """
  stages = [s for s in cut.calls if plan.stages[s] == place]
  generating = [s for s in stages if generates(cut.flow, model, s)]
  others = [s for s in stages if s not in generating]
  placement = plan.places[place]
  if not generating or not others or len(placement.devices) == 1:
    return []
  pairs = itertools.product(
    _on_meshes(model, cut, placement, others),
    _on_meshes(model, cut, placement, generating),
  )
  pairs = [pair for pair in pairs if pair[0].placement != pair[1].placement]
  pairs.sort(key=lambda pair: pair[0].seconds + pair[1].seconds)
  return pairs[:MOST]


def generates(flow: graph.Flow, model, stage: str) -> bool:
  """Whether a stage decodes tokens in JAX."""
  if any(node.name == stage and node.stage.host for node in flow.nodes):
    return False
  work = model.works.get(stage)
  return bool(work and decode.max_tokens(work))


def _on_meshes(model, cut, placement, stages) -> Iterator[Half]:
  """Yields stages on each mesh of some devices that they may have."""
  for axes in model.axes(tuple(stages), len(placement.devices)):
    own = dataclasses.replace(placement, axes=axes)
    seconds = {s: _seconds(model, cut, own, s) for s in stages}
    if all(seconds.values()):
      ordered = {s: sorted(some, key=some.get) for s, some in seconds.items()}
      total = sum(min(some.values()) for some in seconds.values())
      yield Half(own, ordered, total)


def _seconds(model, cut, placement, stage) -> dict[plan_lib.Execution, float]:
  """Returns the seconds of all calls of a stage, by execution."""
  found = {
    execution: sum(
      times
      * model.seconds(
        cut.flow, cut.flow.nodes[cut.first[kind]], placement, *execution
      )
      for kind, times in cut.calls[stage]
    )
    for execution in cut.executions[stage]
  }
  return {execution: n for execution, n in found.items() if n < np.inf}


def _joined(flow, model, plan, place, halves) -> plan_lib.Plan | None:
  """Returns the plan with both halves; None if one does not fit in memory."""
  name = NAME if NAME not in plan.places else f'{place} {NAME}'
  both = dict(zip((place, name), halves, strict=True))
  plan = dataclasses.replace(
    plan,
    places=plan.places | {n: half.placement for n, half in both.items()},
    stages=plan.stages
    | {stage: n for n, half in both.items() for stage in half.executions},
    shared_devices=(place, name),
    order=(),
  )
  for n, half in both.items():

    def memory(taken, n=n):
      return model.memory(flow, _executed(plan, taken), n)

    taken, over = fitting.settle(half.executions, memory, model.capacity)
    if over:
      return None
    plan = _executed(plan, taken)
  return plan if _has_room_in_host(flow, model, plan, both) else None


def _has_room_in_host(flow, model, plan, places) -> bool:
  """Whether the values of places that wait fit where they are then.

  The host has room for those of accelerators. Devices that share its cores
  share its memory as well, so that nothing is gained by waiting there.
  """
  if model.cluster.shared_cores is None:
    return True
  most = (max(model.memory(flow, plan, name).values()) for name in places)
  return sum(most) <= model.capacity


def _executed(plan, executions) -> plan_lib.Plan:
  """Returns a plan with the executions of some stages."""
  micro_batch, remat = (
    {s: x for s, x in old.items() if s not in executions}
    for old in (plan.micro_batch, plan.remat)
  )
  for stage, (rows, policy) in executions.items():
    if rows is not None:
      micro_batch[stage] = rows
    if policy != plan_lib.STORE_ALL:
      remat[stage] = policy
  return dataclasses.replace(plan, micro_batch=micro_batch, remat=remat)
