"""What the driver has asked of actors, until all of them have answered."""

import dataclasses
from typing import Any

import ray

from rlinf_jax.runtime.base import StageError

# Of taking a place over, after which a run goes on from its checkpoint.
FAILURES = StageError, ValueError, LookupError, ray.exceptions.RayError


@dataclasses.dataclass(eq=False)
class PendingCall:
  """A call of a flow that has not ended.

  Attributes:
    name: of the flow.
    step: the update that it is.
    leaves: a reference to its inputs.
    number: of the turn, since a state was loaded.
    count: of turns of the same flow before it.
    of: processes that have not been heard, by what they will answer.
  """

  name: str
  step: int
  leaves: Any
  number: int
  count: int
  of: dict[Any, str] = dataclasses.field(default_factory=dict)


def answered(one) -> bool:
  """Whether an answer is there, and is none of a death."""
  if not ray.wait([one], timeout=0)[0]:
    return False
  try:
    ray.get(one)
  except ray.exceptions.RayError:
    return False
  return True
