"""Loops inside a step, whose body is a flow of stages."""

from collections.abc import Callable
import dataclasses
from typing import Any

import jax


@dataclasses.dataclass(frozen=True, eq=False)
class Repeat:
  """Calls `body` up to `at_most` times, until it reports that it is done.

    loop = Repeat(body, 'fill', at_most=4)
    carry = loop(carry, *given)

  Called with arrays, it is a Python loop. Called with symbols, it becomes one
  node of the step's flow, whose body is a flow of its own; every place that
  runs part of the body repeats its part until a boolean, sent to all of them,
  is true.

  Attributes:
    body: `carry, *given -> carry, done`, which routes values between stages as
      a step does. `done` is a boolean made by a stage; None repeats the body
      `at_most` times.
    name: its name in logs. Plans name the stages of its body.
    at_most: maximum number of iterations.
    expect: number of iterations that planners assume; `at_most` if None.
  """

  body: Callable[..., tuple[Any, Any]]
  name: str
  at_most: int
  expect: int | None = None

  # The fields that a planner reads of a stage.
  grain = 'batch'
  unbatched = ()
  consumes = ()
  group_size = 1
  host = False

  def __post_init__(self):
    expect = self.at_most if self.expect is None else self.expect
    if not 1 <= expect <= self.at_most:
      raise ValueError(
        f'Loop {self.name} runs at most {self.at_most} times, so '
        f'expect={expect} '
        f'is impossible: choose 1 to {self.at_most}.'
      )

  def __call__(self, carry, *given):
    for leaf in jax.tree.leaves((carry, given)):
      if hasattr(leaf, '__record__'):
        return leaf.__record__(self, (carry, *given))
    return self.run(carry, *given)

  def run(self, carry, *given):
    for _ in range(self.at_most):
      carry, done = self.body(carry, *given)
      if done is not None and done:
        break
    return carry
