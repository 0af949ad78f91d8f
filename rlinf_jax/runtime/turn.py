"""Calls of flows that actors take part in, as the driver keeps them."""

import dataclasses
from typing import Any

import ray

from rlinf_jax.runtime.worker import StageError

# Of taking a place over, after which a run goes on from its checkpoint.
FAILURES = StageError, ValueError, LookupError, ray.exceptions.RayError


@dataclasses.dataclass(eq=False)
class Turn:
  """A call of a flow that has not ended.

  Attributes:
    name: of the flow.
    step: the update that it is.
    leaves: a reference to its inputs.
    number: of the turn, since a state was loaded.
    count: of turns of the same flow before it.
    asked: processes that take part in it, by what they will answer.
  """

  name: str
  step: int
  leaves: Any
  number: int
  count: int
  asked: dict[Any, str] = dataclasses.field(default_factory=dict)


def answered(asked) -> bool:
  """Whether an answer is there, and is none of a death."""
  if not ray.wait([asked], timeout=0)[0]:
    return False
  try:
    ray.get(asked)
  except ray.exceptions.RayError:
    return False
  return True
