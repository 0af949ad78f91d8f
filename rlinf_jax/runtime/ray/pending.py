"""Calls that actors have been sent and not all have answered."""

import dataclasses
from typing import Any

import ray

from rlinf_jax.runtime.base import ProcessDiedError, StageError


@dataclasses.dataclass(eq=False)
class PendingCall:
  """A call of a flow that some processes have not finished.

  Attributes:
    flow: its name.
    step: number of the update.
    inputs: a reference to its inputs in Ray's object store.
    number: of the call, since a state was loaded.
    flow_call: number of the call among those of the same flow.
    processes: those that have not finished, by the reference to their answer;
      or, once that is read, to the news that what they sent has arrived.
    sent: what those have answered of which the latter is awaited, see
      `CallLog.finish`.
  """

  flow: str
  step: int
  inputs: Any
  number: int
  flow_call: int
  processes: dict[Any, str] = dataclasses.field(default_factory=dict)
  sent: dict[Any, Any] = dataclasses.field(default_factory=dict)

  def lacks(self, process: str) -> bool:
    """Whether a process has not finished.

    One that has answered may die with a value on its way.
    """
    return any(
      name == process and not self.is_finished(reference)
      for reference, name in self.processes.items()
    )

  def is_finished(self, reference) -> bool:
    """Whether the process of a reference has answered, and all has arrived."""
    return reference in self.sent and is_answered(reference)


def is_answered(reference) -> bool:
  """Whether an answer has arrived, and is not the news of a death."""
  if not ray.wait([reference], timeout=0)[0]:
    return False
  try:
    ray.get(reference)
  except ray.exceptions.RayError:
    return False
  return True


def as_stage_error(error, process: str = '') -> BaseException:
  """An error that Ray reports of an actor, as the runtime reports it.

  Args:
    error: what Ray raised.
    process: the actor's process.
  """
  if isinstance(error, ray.exceptions.RayTaskError):
    cause = error.cause
    if isinstance(cause, StageError | ValueError):
      return type(cause)(str(cause))
    return StageError(f'Place {process!r} failed: {cause}')
  if isinstance(error, ray.exceptions.RayActorError):
    why = str(error).strip().splitlines()[-1]
    return ProcessDiedError(f'The process of place {process!r} has died: {why}')
  return StageError(str(error))
