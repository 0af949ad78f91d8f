"""Reward functions in processes of their own, each call with limits.

A parser of completions meets any text at all. Some texts keep it busy forever,
fill the memory or crash the interpreter. Here, only their own reward is lost.
"""

from collections.abc import Sequence
import inspect
import math

from rlinf_jax.isolation import pool
from rlinf_jax.rewards import base, first_failure


def isolated(
  function: base.Reward,
  *,
  seconds: float = 5.0,
  memory: float = 2.0,
  processes: int | None = None,
) -> base.Batched:
  """A reward function that runs in a bounded pool of processes.

  A call that raises, takes too long, asks for too much memory or ends its
  process has no reward (NaN), and the next one runs in a new process.

  Args:
    function: a function of a module, which the processes import. They call it
      with a completion alone, so what a recipe binds of it has no effect.
    seconds: that one call may take.
    memory: gigabytes that a process may map.
    processes: their number; by default one a CPU, at most
      `pool.MAX_PROCESSES`.

  Raises:
    ValueError: if the function cannot be imported by its name or is `async`, or
      for limits that no call could keep.
  """
  if inspect.iscoroutinefunction(inspect.unwrap(function)):
    raise ValueError(
      f'The reward {function.__name__} is an `async` function, which processes '
      'do not await: give it without `isolated`, and its calls wait together.'
    )
  calls = pool.pool(
    function, seconds=seconds, memory=memory, processes=processes
  )
  return _batched(calls, calls.name)


def named(
  module: str,
  name: str,
  *,
  seconds: float = 5.0,
  memory: float = 2.0,
  processes: int | None = None,
) -> base.Batched:
  """As `isolated`, of a function that this process need not import."""
  calls = pool.named(
    module, name, seconds=seconds, memory=memory, processes=processes
  )
  return _batched(calls, name)


def _batched(calls: pool.Pool, name: str) -> base.Batched:
  """A reward of many completions; NaN where a call failed."""

  report = first_failure.Report(name)

  def number(value) -> float:
    if isinstance(value, pool.CallError):
      report(str(value))  # It names the exception.
      return math.nan
    return report.number(value)

  def score(completions: Sequence[base.Completion]) -> list[float]:
    return [number(value) for value in calls.map(completions)]

  return base.Batched(name, score)
