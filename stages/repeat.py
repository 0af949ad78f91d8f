"""A loop inside a step: stages again and again, until one says it is enough."""

from collections.abc import Callable
import dataclasses
from typing import Any

import jax


@dataclasses.dataclass(frozen=True, eq=False)
class Repeat:
  """Calls `body` at most so many times; called like a stage.

    loop = Repeat(body, 'fill', at_most=4)
    carry = loop(carry, *given)

  Called with arrays, it is a loop of Python. Called with symbols, it is one
  call in the flow of the step, whose body is a flow of its own; every place
  that has a part in it goes round until a value, sent to all, is true.

  Attributes:
    body: `carry, *given -> carry, done`, which routes values between stages as
      a step does. `done` is a boolean that a stage has made; None goes round
      `at_most` times.
    name: what logs call it. Plans know the stages of its body, not it.
    at_most: how often.
    expect: how often planners shall count on; `at_most` if None.
  """

  body: Callable[..., tuple[Any, Any]]
  name: str
  at_most: int
  expect: int | None = None

  # What a planner asks of a stage.
  grain = 'batch'
  unbatched = ()
  consumes = ()
  group_size = 1
  host = False

  def __post_init__(self):
    expect = self.at_most if self.expect is None else self.expect
    if not 1 <= expect <= self.at_most:
      raise ValueError(
        f'Loop {self.name} cannot be expected to go round {expect} times when '
        f'it goes round {self.at_most} times at most: it must be 1 to as many.'
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
