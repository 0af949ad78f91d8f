"""Seconds of host stages: of their work, or until others have answered."""

from collections.abc import Sequence
import functools
import math

import numpy as np

from planner.costs import breakdown
from planner.costs import measured as measured_lib
from planner.costs.measured import Estimate
from planner.ir import graph

MOST = 1000  # Quantiles that stand for more measured answers.


def waiting(flow: graph.Flow) -> tuple[str, ...]:
  """Names of the stages that wait for others, such as tools, to answer."""
  found = {}
  for node in flow.nodes:
    if node.body:
      found |= dict.fromkeys(waiting(node.body))
    elif getattr(node.stage, 'awaited', None):
      found[node.name] = None
  return tuple(found)


def seconds(
  stage,
  rows: float,
  moved: float,
  measured: measured_lib.Measurements,
  guess: float,
) -> breakdown.CostBreakdown:
  """Seconds of a call.

  Args:
    stage: the host stage.
    rows: rows of the call.
    moved: seconds in which its values go from and to the device.
    measured: what was measured. Answers of others include their own work.
    guess: seconds of a row where nothing was.
  """
  if measured.answers and getattr(stage, 'awaited', None):
    n = max(1, round(rows))
    spent = expected(measured.answers, n, stage.awaited(n))
    what, number = 'waiting for answers', Estimate(spent, 'measured')
  else:
    each = measured.host_rows.get(stage.name)
    tag = 'assumed' if each is None else 'measured'
    spent = (guess if each is None else each) * max(rows, 1)
    what, number = 'on the host', Estimate(spent, tag)
  parts = {'from and to the device': Estimate(moved, 'modeled'), what: number}
  total = Estimate(moved + number.value, number.tag)
  return breakdown.CostBreakdown(total, parts)


@functools.lru_cache(4096)
def expected(seconds: tuple[float, ...], rows: int, answers: int) -> float:
  """Expected seconds until so many of the answers to `rows` are there.

  All are asked at once, and take independent times, drawn from the measured
  ones x₁ ≤ … ≤ xₘ. The k-th of n answers comes by xᵢ if k or more of n draws
  are no later:

    E = Σᵢ xᵢ (Pᵢ − Pᵢ₋₁)    Pᵢ = Σⱼ≥ₖ C(n, j) pʲ (1 − p)ⁿ⁻ʲ    p = i / m

  Args:
    seconds: measured seconds of answers.
    rows: n.
    answers: k; without any, there is nothing to wait for.
  """
  if not answers:
    return 0.0
  x_m = _sorted(seconds)
  arrived_m = np.arange(1, x_m.size + 1) / x_m.size
  by_m = np.array([_at_least(answers, rows, p) for p in arrived_m])
  return float(x_m @ np.diff(by_m, prepend=0.0))


def _sorted(seconds: Sequence[float]) -> np.ndarray:
  x = np.sort(np.asarray(seconds, float))
  if x.size <= MOST:
    return x
  return np.quantile(x, (np.arange(MOST) + 0.5) / MOST)


def _at_least(k: int, n: int, p: float) -> float:
  """The probability that k or more of n draws succeed, each with p."""
  if p >= 1.0:
    return 1.0
  if k == n:
    return p**n
  j = np.arange(k, n + 1)
  log_n = _log_factorials(n)
  log_ways = log_n[n] - log_n[j] - log_n[n - j]
  return float(
    np.exp(log_ways + j * math.log(p) + (n - j) * math.log1p(-p)).sum()
  )


@functools.lru_cache(64)
def _log_factorials(n: int) -> np.ndarray:
  return np.cumsum(np.log(np.maximum(np.arange(n + 1), 1)))
