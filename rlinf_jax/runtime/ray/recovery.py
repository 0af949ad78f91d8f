"""Replaces a process that died, without repeating what others have received.

A place that only holds copies of other places' values can lose its process in
the middle of a step. A new process takes over:

1. It loads the state that was loaded last. If steps have followed it, others
   send what these have changed (4.), and only what steps do not change is
   needed of the state. That is the same in every checkpoint of the run, so it
   is read from the newest: an older one may have been removed.
2. All others send it again what they have logged (`send_log`), and answer how
   many values of the dead process they had received.
3. From these answers follows what is left to do (`planner.lower.recovery`).
4. It receives what the place carried, and executes the unfinished calls again.
"""

import collections
from collections.abc import Mapping
import time
from typing import Any

import ray

from planner.ir import plan as plan_lib
from planner.lower import recovery
from rlinf_jax.runtime import base, programs
from rlinf_jax.runtime.ray import actor as actor_lib
from rlinf_jax.runtime.ray import actor_pool as actor_pool_lib
from rlinf_jax.runtime.ray import call_log as call_log_lib
from rlinf_jax.runtime.ray import pending

# Errors of `Recovery.replace`. The run then goes on from its checkpoint.
ERRORS = base.StageError, ValueError, LookupError, ray.exceptions.RayError


class Recovery:
  """Replaces processes, for a driver that holds its lock meanwhile.

  A place that can be replaced has one process, which is named as the place.

  Attributes:
    replaceable: places that can be replaced, with the values that they carry.
  """

  def __init__(
    self,
    plan: plan_lib.Plan,
    lowered: dict[str, programs.Lowered],
    pool: actor_pool_lib.ActorPool,
    log: call_log_lib.CallLog,
  ):
    self._plan, self._lowered = plan, lowered
    self._pool, self._log = pool, log
    self.replaceable = actor_lib.replaceable(plan, lowered)

  def replace(self, place: str, next_step: int) -> str:
    """Replaces the process of a place; returns a line for people.

    Args:
      place: whose process died.
      next_step: number of the step after those submitted.

    Raises:
      One of `ERRORS`, if the replacement cannot be given what it needs.
    """
    start = time.perf_counter()
    calls = [call for call in self._log.pending if call.lacks(place)]
    first = calls[0] if calls else self._log.new_call('step', next_step)
    self._check_senders(place, first)
    # Before a new process, which takes seconds to start.
    others = {k: x for k, x in self._pool.actors.items() if k != place}
    self._pool.call_all(
      lambda _, other: other.check_resend.remote(place, first.number), others
    )
    actor = self._load(place, first)
    arrived = self._resend(place, actor, first, others)
    remaining = self._remaining(place, first, arrived)
    if first.step > self._log.first_step:
      actor.receive_carry.remote(self._carried(place))
    for call in calls:
      call.processes = {
        reference: process
        for reference, process in call.processes.items()
        if process != place or call.is_finished(reference)
      }
      left = remaining if call is first else recovery.EVERYTHING
      self._log.send(call, place, actor, left)
    self._log.replaced[place] = first.number
    return (
      f'The process of place {place!r} has died in step {first.step} and was '
      f'replaced in {time.perf_counter() - start:.1f} s: {len(arrived)} of its '
      f'values had arrived, and {len(remaining.skip)} calls of stages are not '
      'repeated.'
    )

  def _check_senders(self, place: str, first: pending.PendingCall):
    """Raises LookupError if a process that is to send again is new itself."""
    if any(
      name != place and first.number <= number + 1
      for name, number in self._log.replaced.items()
    ):
      raise LookupError(
        'A process that would send values again was replaced itself.'
      )

  def _load(self, place: str, first: pending.PendingCall):
    """Starts the new process with a state."""
    actor = self._pool.restart(place)
    log = self._log
    state = log.state
    if first.step > log.first_step:
      state = state.of_constants()
    sent = log.sent.get(place, {})
    ray.get(actor.load.remote(log.generation, sent, state))
    return actor

  def _resend(
    self,
    place: str,
    actor: Any,
    first: pending.PendingCall,
    others: Mapping[str, Any],
  ) -> set[tuple[int, str]]:
    """Has all others send again what is needed.

    Returns:
      Values of the first call that the dead process had sent, with the place
      at which they have arrived.

    Raises:
      LookupError: if processes of one place have received different values,
        and an engine would not make them alike.
    """
    counts = self._pool.call_all(
      lambda _, other: other.resend.remote(place, [actor], first.number),
      others,
    )
    readers = collections.Counter(
      (to.value, to.target)
      for count in counts.values()
      for to, n in count.items()
      if to.flow == first.flow and not to.loop and n > first.flow_call
    )
    places = self._plan.places
    arrived = {
      end for end, n in readers.items() if n == places[end[1]].processes
    }
    flow = self._lowered[first.flow].flow
    if arrived != readers.keys() and recovery.acts_outside(flow):
      raise LookupError(
        'Some processes of a place have received what others lack.'
      )
    return arrived

  def _remaining(self, place, first, arrived) -> recovery.Left:
    """The part of the first call that the replacement executes."""
    lowered = self._lowered[first.flow]
    left = recovery.left(lowered.flow, lowered.programs[place], arrived)
    if left is None:
      raise LookupError('An engine would contradict what has arrived.')
    return left

  def _carried(self, place: str) -> dict[int, base.Channel]:
    """The channels of carried values, by their numbers in the carry."""
    step = self._lowered['step']
    starts = {start: i for i, (start, _) in enumerate(step.flow.carry)}
    return {
      starts[v]: base.Channel('step', (), op.value, op.place, place)
      for v, op in actor_lib.carried_copies(step, place).items()
      if op
    }
