"""Chooses how the stages of a place run, so that they fit in memory."""

from collections.abc import Callable, Mapping, Sequence
import functools

import numpy as np

from planner.ir import plan as plan_lib


def fastest(choices, cut, choice, b: int) -> tuple | None:
  """Returns the fastest executions with which a place fits in memory.

  What a device needs while a stage runs does not depend on the executions of
  other stages. So each stage takes the fastest execution that fits: together
  they are the fastest that fit.

  Args:
    choices: a `choices.Choices`.
    cut: the cut flow.
    choice: a plan; its executions at the place do not matter.
    b: index of the place.

  Returns:
    Pairs of a stage and its execution; None if a stage fits with none.
  """
  stages = choices.stages(choices.blocks[choice.part][b])
  ordered = {s: _by_seconds(choices, cut, choice, b, s) for s in stages}
  if not all(ordered.values()):
    return None  # Rows that the mesh cannot divide.
  found, over = settle(
    ordered,
    lambda taken: choices.memory(_with(choice, b, taken), b),
    choices.model.capacity,
  )
  if over:
    choices.note(_with(choice, b, found), b, over)
    return None
  return tuple(found.items())


def settle(
  ordered: Mapping[str, Sequence[plan_lib.Execution]],
  memory: Callable[[Mapping[str, plan_lib.Execution]], Mapping[str, float]],
  capacity: float,
) -> tuple[dict[str, plan_lib.Execution], float]:
  """Gives each stage of a place the fastest execution that fits.

  Args:
    ordered: executions of each stage, the fastest first.
    memory: the bytes of a device while each node runs, under some executions.
    capacity: bytes of a device that may be used.

  Returns:
    The executions, and 0; or if a stage fits with none, those of least memory,
    and the bytes that are needed then.
  """
  ordered = {stage: list(some) for stage, some in ordered.items()}
  taken = {stage: some.pop(0) for stage, some in ordered.items()}
  if capacity == np.inf:
    return taken, 0.0
  least = {}  # By node: fewest bytes, and the execution.
  while True:
    for name, need in memory(taken).items():
      least[name] = min(
        least.get(name, (np.inf, None)), (need, taken.get(name)), key=_bytes
      )
    over = {name for name, (need, _) in least.items() if need > capacity}
    more = [stage for stage in taken if stage in over and ordered[stage]]
    if not more:
      break
    for stage in more:
      taken[stage] = ordered[stage].pop(0)
  if not over:
    return taken, 0.0
  taken |= {stage: least[stage][1] for stage in taken}
  return taken, max(need for need, _ in least.values())


def _bytes(entry) -> float:
  return entry[0]


def _by_seconds(choices, cut, choice, b, stage) -> list[plan_lib.Execution]:
  """Returns the executions of a stage that its mesh allows, fastest first.

  If none may fit, only the one that needs least memory is returned.
  """
  where = choice.units[b], choice.axes[b]

  def seconds(execution):
    return sum(
      times * choices.seconds(cut, kind, *where, execution)
      for kind, times in cut.calls[stage]
    )

  def possible(some):
    found = {execution: seconds(execution) for execution in some}
    return [x for x in sorted(found, key=found.get) if found[x] < np.inf]

  some = possible(choices.executions(cut, stage, *where))
  if some:
    return some
  some = possible(cut.executions[stage])
  least = functools.partial(choices.least_memory, cut, stage, *where)
  return sorted(some, key=least)[:1]


def _with(choice, b: int, taken) -> tuple:
  """Returns a plan with other executions at a place."""
  executions = list(choice.executions)
  executions[b] = tuple(taken.items())
  return choice._replace(executions=tuple(executions))
