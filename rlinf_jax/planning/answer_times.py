"""Seconds that environments and their tools take to answer, as measured."""

from collections.abc import Mapping, Sequence
import math
import os
import pathlib

from planner.costs import host_stage
from planner.explain import overview
from planner.ir import graph


def read(file: str | os.PathLike) -> tuple[float, ...]:
  """Reads the seconds of answers, one a line, from a file.

  Raises:
    ValueError: for a file with anything else, or with nothing.
  """
  try:
    found = [float(x) for x in pathlib.Path(file).read_text().split()]
  except (OSError, ValueError):
    found = []
  if not found or not all(0 <= x < math.inf for x in found):
    raise ValueError(
      f'{file} should hold the seconds of answers of environments, one a line, '
      'as a run writes them with episodes.envs.answer_seconds.'
    )
  return tuple(found)


def describe(flow: graph.Flow, seconds: Sequence[float]) -> str | None:
  """Says how long stages wait for answers; None if no stage does.

  Args:
    flow: as recorded, with its loops unrolled.
    seconds: measured seconds of answers; none if they were not measured.

  Raises:
    ValueError: for answers of which no stage waits.
  """
  waiting = {
    node.name: node
    for node in flow.nodes
    if node.name in host_stage.waiting(flow)
  }
  if not waiting:
    if seconds:
      raise ValueError(
        'Seconds of answers were given, and no stage of the recipe waits for '
        'answers.'
      )
    return None
  names = ', '.join(waiting)
  if not seconds:
    return (
      f'How long {names} waits for tools is not known; --answer_seconds takes '
      'a file of what answers took.'
    )
  lines = [
    f'Answers took {sum(seconds) / len(seconds):.3g} s on average and '
    f'{max(seconds):.3g} s at most, of {len(seconds):,} measured.'
  ]
  for name, node in waiting.items():
    rows = flow.rows_of(node)
    answers = node.stage.awaited(rows)
    spent = host_stage.expected(tuple(seconds), rows, answers)
    lines.append(
      f'A call of {name} on {rows:,} rows waits {spent:.3g} s, until '
      f'{answers:,} answers have come; its place is free meanwhile, as for '
      'other pieces of the batch.'
    )
  return ' '.join(lines)


def waiting(flow: graph.Flow, simulation) -> dict[str, float]:
  """Seconds of a step in which calls wait for answers, by stage.

  Args:
    flow: of the plan.
    simulation: of the plan, with measured seconds of answers.
  """
  names = host_stage.waiting(flow)
  busy = overview.busy(flow, simulation).values()
  return {name: sum(stages.get(name, 0.0) for stages in busy) for name in names}


def share(waiting: Mapping[str, float], step: float) -> str | None:
  """Says how much of a step's calls is waiting for answers, if any is.

  Args:
    waiting: seconds by stage.
    step: seconds of a step.
  """
  if not waiting:
    return None
  return (
    f'{", ".join(waiting)}: {sum(waiting.values()):.3g} s of calls in a step '
    f'of {step:.3g} s wait for answers of tools, and compute nothing.'
  )
