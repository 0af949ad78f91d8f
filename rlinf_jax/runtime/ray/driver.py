"""Runs a plan with one Ray actor per process of a place.

The driver announces calls and reads what they return. It takes no part in
between: every actor works through its own program, and values go from actor to
actor.
"""

from collections.abc import Callable
from concurrent import futures
import contextlib
import functools
import pathlib
import threading
from typing import Any

import ray

from planner.ir import graph as graph_lib
from planner.ir import plan as plan_lib
from rlinf_jax.runtime import calls, programs
from rlinf_jax.runtime import timeline as timeline_lib
from rlinf_jax.runtime.base import ProcessDiedError, StageError
from rlinf_jax.runtime.ray import actor as actor_lib
from rlinf_jax.runtime.ray import actor_pool as actor_pool_lib
from rlinf_jax.runtime.ray import call_log as call_log_lib
from rlinf_jax.runtime.ray import pending
from rlinf_jax.runtime.ray import recovery as recovery_lib
from rlinf_jax.runtime.ray.transport import channel, serialize
from rlinf_jax.state import state_files, state_readers


class RayRuntime(calls.Calls):
  """A `base.Runtime` whose places are processes of a Ray cluster.

  The actors hold the carried state. The thread that drives the runtime sends
  calls; a thread per pending call collects its answers. While calls are
  pending, `_lock` guards the call log and the actor pool, so that no process is
  replaced while a call is sent.

  If a process dies, `recovery` replaces it where the place only holds copies of
  others' values. Otherwise, and after any other error, the first failure stops
  all actors and is raised until `start`, which starts dead processes again.

  Attributes:
    plan: the plan in execution.
    lowered: programs, by flow.
    timeline: what ran when, on the driver's clock.
    steps: number of steps submitted.
  """

  def __init__(
    self,
    plan: plan_lib.Plan,
    flows: actor_lib.Flows,
    *,
    step: graph_lib.Flow,
    evaluate: graph_lib.Flow | None = None,
    receive_timeout: float | None = None,
    network_interface: str | None = None,
  ):
    """Raises ValueError for what the plan cannot run; starts nothing.

    Args:
      plan: how to run the flows.
      flows: records the flows in any process; Ray must be able to pickle it.
      step: the flow of a step.
      evaluate: the flow of an evaluation.
      receive_timeout: seconds that a place waits for a value of another; None
        for no limit.
      network_interface: as `ActorPool`.
    """
    self.plan, self.steps = plan, 0
    self.lowered = programs.lower(plan, step, evaluate)
    self.timeline = timeline_lib.Timeline()
    self._pool = actor_pool_lib.ActorPool(
      plan, flows, self.lowered, receive_timeout, network_interface
    )
    self._log = call_log_lib.CallLog()
    self._recovery = recovery_lib.Recovery(
      plan, self.lowered, self._pool, self._log
    )
    self._failure: BaseException | None = None
    self._notices: list[str] = []
    self._running: list[futures.Future] = []  # Of `_collect`.
    self._threads = futures.ThreadPoolExecutor(64)
    self._lock = threading.RLock()

  def transport(self, source: str, target: str, value: graph_lib.Value) -> str:
    self._start_missing()
    near = target in self._pool.same_machine(source)
    several = self.plan.places[target].processes > 1
    return channel.transport(value.dtype, value.bytes, near, several)

  def compile(self, name: str):
    self._pool.compile(name)

  def start(self, state: state_readers.StateReader, steps: int = 0):
    futures.wait(self._running)
    self._pool.cleanup()
    self._start_missing()
    self._failure, self._running, self.steps = None, [], steps
    self._log.reset(state, steps)
    generation = self._log.generation
    self._pool.call_all(
      lambda _, actor: actor.load.remote(generation, None, state)
    )

  def start_writing(self, folder: pathlib.Path) -> Callable[[], None]:
    self.wait()
    self._recover()
    numbers, owners = list(self.plan.places), self._owners(is_frozen=False)

    def start(name, actor):
      number = numbers.index(self._pool.processes[name].place)
      return actor.start_writing.remote(folder / str(number))

    finish = functools.partial(self._finish_writing, owners)
    # All answers, as a process that has not answered is still writing.
    failure = self._first_failure(
      {start(name, actor): name for name, actor in owners.items()}
    )
    if failure:
      with contextlib.suppress(StageError, ValueError):
        finish()  # No process writes any more when the failure is raised.
      raise failure
    return finish

  def _owners(self, is_frozen: bool) -> dict[str, Any]:
    """The actors of processes that own some values of the carried state.

    Args:
      is_frozen: whether of its frozen values, or else of all others, which are
        what checkpoints hold.
    """
    step = self.lowered['step']
    leaves = state_files.leaves(step.flow.carry_tree)
    places = {
      first
      for leaf, (first, *_) in zip(leaves, step.resident, strict=True)
      if leaf.is_frozen == is_frozen
    }
    return {
      name: actor
      for name, actor in self._pool.actors.items()
      if self._pool.processes[name].place in places
    }

  def _finish_writing(self, owners):
    """Blocks until all processes have written; raises their first failure."""
    failure = self._first_failure(
      {actor.finish_writing.remote(): name for name, actor in owners.items()}
    )
    if failure:
      raise failure

  def _first_failure(self, names) -> BaseException | None:
    """Waits until all who write have answered; returns the first failure.

    If one of several processes of a place fails, all of them are killed: the
    others would wait for it.

    Args:
      names: process, by the reference to its answer.
    """
    unanswered, first = list(names), None
    while unanswered:
      (reference,), unanswered = ray.wait(unanswered)
      try:
        ray.get(reference)
      except ray.exceptions.RayError as error:
        process = names[reference]
        with self._lock:
          # A death may first be seen as an error of those who waited for it.
          death = first or self._pool.death_in_place(process)
          self._pool.kill_place_of(process)
        first = first or death or pending.as_stage_error(error, process)
    return first

  def checksums(self) -> dict[str, int]:
    self.wait()
    self._recover()
    try:
      return self._read_checksums()
    except StageError:  # A process may have died since.
      self._recover()
      return self._read_checksums()

  def _read_checksums(self) -> dict[str, int]:
    found = {}
    answers = self._pool.call_all(
      lambda _, actor: actor.checksums.remote(), self._owners(is_frozen=True)
    )
    for checksums in answers.values():
      found |= checksums
    return found

  def wait(self):
    futures.wait(self._running)
    if self._failure:
      raise self._failure

  def close(self):
    self._pool.close()
    self._threads.shutdown(wait=False)

  def processes(self) -> dict[str, dict[str, Any]]:
    """Describes each process, as `Actor.describe`; starts missing ones."""
    self._start_missing()
    return dict(self._pool.descriptions)

  def moved(self) -> dict[tuple[str, str], tuple[int, float]]:
    found = {}
    answers = self._pool.call_all(lambda _, actor: actor.moved.remote())
    for moved in answers.values():
      found |= moved
    return found

  def notices(self) -> list[str]:
    with self._lock:
      lines, self._notices = self._notices, []
    return lines

  def _start_missing(self):
    with self._lock:
      self._pool.start_missing()

  def _submit(self, name, *inputs) -> futures.Future:
    """Sends a call to all actors; returns the future of its info."""
    if self._failure:
      raise self._failure
    shapes = calls.shapes_of_flow(self.lowered[name].flow)
    if calls.shapes_of(inputs) != shapes:
      raise ValueError(
        f'A batch has the shapes {calls.shapes_of(inputs)}, and processes of '
        f'Ray were started for {shapes}: leave out buckets, or run in one '
        'process.'
      )
    self._start_missing()
    self.steps += name == 'step'
    step = self.steps + (name != 'step')
    with self._lock:
      call = self._log.new_call(name, step, inputs)
      self._log.add(call)
      for process, actor in self._pool.actors.items():
        self._log.send(call, process, actor)
    outputs = self._threads.submit(self._collect, call)
    running = [call for call in self._running if not call.done()]
    self._running = [*running, outputs]
    return calls.info_of(self.lowered[name].flow, outputs)

  def _collect(self, call: pending.PendingCall) -> dict[int, Any]:
    """Blocks until all processes have finished a call; returns its outputs."""
    outputs = {}
    while call.processes:
      (reference, *_), _ = ray.wait(list(call.processes))
      try:
        answer = ray.get(reference)
      except ray.exceptions.RayError as error:
        self._handle_error(call, reference, error)
        continue
      with self._lock:
        process = call.processes.pop(reference, None)
        if process is None:
          continue  # It has died since, and its replacement answers instead.
        if reference in call.sent:  # All that it sent has arrived.
          place = self._pool.processes[process].place
          self._log.finish(call, process, place, call.sent.pop(reference))
          continue
        packed, spans, sent, notices = answer
        arrived = self._pool.actors[process].delivered.remote()
        call.processes[arrived], call.sent[arrived] = process, sent
        self._notices += [f'{process}: {line}' for line in notices]
      outputs |= {v: serialize.unpack(x) for v, x in packed.items()}
      epoch = self._pool.descriptions[process]['epoch']
      offset = epoch - self.timeline.epoch
      self.timeline.extend(
        span._replace(start=span.start + offset, end=span.end + offset)
        for span in spans
      )
    with self._lock:
      self._log.pending.remove(call)
    return outputs

  def _handle_error(self, call: pending.PendingCall, reference, error):
    """Replaces a process that has died, or fails.

    Raises:
      StageError: the failure, if the process cannot be replaced.
    """
    with self._lock:
      if reference not in call.processes:
        return  # Another thread has replaced the process.
      process = call.processes[reference]
      died = isinstance(error, ray.exceptions.RayActorError)
      if not self._failure and died and process in self._recovery.replaceable:
        # If this fails, the death is the error to report.
        with contextlib.suppress(*recovery_lib.ERRORS):
          self._replace(process)
          return
      self._fail(process, error)
    raise self._failure

  def _replace(self, process: str):
    notice = self._recovery.replace(process, self.steps + 1)
    self._notices.append(notice)

  def _recover(self):
    """Replaces processes that have died between calls.

    Raises:
      ProcessDiedError: if one of them held values that no other place has.
    """
    with self._lock:
      for process, error in self._pool.dead().items():
        if process not in self._recovery.replaceable:
          raise error
        try:
          self._replace(process)
        except recovery_lib.ERRORS:
          raise error from None

  def _fail(self, process: str, error):
    """Keeps the first failure, and stops all places."""
    if self._failure:
      return
    dead = [*self._pool.dead().values()]
    self._failure = dead[0] if dead else pending.as_stage_error(error, process)
    if self._log.replaced and not dead:
      # A consequence of an earlier death may come late, such as a pull from the
      # dead process. As a death it lets the run go on from its checkpoint.
      self._failure = ProcessDiedError(str(self._failure))
    for name, actor in self._pool.actors.items():
      if name != process:
        actor.fail.remote(str(self._failure))
    self._pool.kill_spanning()
