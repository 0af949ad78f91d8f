"""Some places of a plan in this process, one thread each."""

from collections.abc import Callable, Mapping
from concurrent import futures
import pathlib
import threading

import jax

from planner.ir import graph as graph_lib
from planner.lower import recovery
from rlinf_jax.runtime import base, programs
from rlinf_jax.runtime import interpreter as interpreter_lib
from rlinf_jax.runtime import mailbox as mailbox_lib
from rlinf_jax.runtime import timeline as timeline_lib
from rlinf_jax.runtime.places import place as place_lib
from rlinf_jax.runtime.step_call import StackFrame, StepCall
from rlinf_jax.state import frozen_weights, state_files, state_readers
from sharding import rounding


class Executor:
  """Interprets the programs of some places, each on a thread of its own.

  A place works through its program, call by call, and blocks only where it
  receives a value or waits for shared devices. There is no central scheduler:
  lowering has matched every send with a receive. `send_remote` carries values
  to places of other processes; an executor of all places does not need it.

  The first failure, of a place or reported by `fail`, wakes every thread that
  waits for a value. Threads stay; `read_state` clears the failure.

  Attributes:
    lowered: programs, by flow.
    places: devices, by name of the place.
    interpreters: threads, by name of the place.
    timeline: what ran when.
    mailbox: values on their way to these places.
    receive_timeout: seconds to wait for a value; None for no limit.
  """

  def __init__(
    self,
    lowered: Mapping[str, programs.Lowered],
    places: Mapping[str, place_lib.Place],
    receive_timeout: float | None = None,
  ):
    """Raises ValueError for what the places cannot run; computes nothing."""
    self.lowered, self.places = dict(lowered), dict(places)
    self.receive_timeout = receive_timeout
    self.timeline = timeline_lib.Timeline()
    self.mailbox = mailbox_lib.Mailbox()
    self._compiled, self._lock = {}, threading.Lock()
    self._check()
    self.interpreters = {
      name: interpreter_lib.Interpreter(self, place)
      for name, place in places.items()
    }

  def _check(self):
    for _, place, flow, op, _ in self._stage_calls(*self.lowered):
      node = flow.nodes[op.node]
      place.check_node(flow, node)
      for v in (*node.reads, *node.writes):
        place.layout(flow.values[v])

  def _stage_calls(self, *flows: str):
    """Yields every call of a stage on these places.

    As `programs.stage_calls`, with the place after the enclosing loops.
    """
    for lowered in (self.lowered[name] for name in flows):
      for name, place in self.places.items():
        calls = programs.stage_calls(lowered.flow, lowered.programs[name])
        for loop, flow, op, passed in calls:
          yield loop, place, flow, op, passed

  def read_state(self, state: state_readers.StateReader):
    """Reads the carried values that live here, and clears a failure."""
    for interpreter in self.interpreters.values():
      interpreter.wait()
      interpreter.state = {}  # Frees the last state before another is read.
    self.mailbox.clear()
    lowered, layouts = self.lowered['step'], {}
    for name, place in self.places.items():
      hosted = programs.hosted(lowered, name)
      for i, places in enumerate(lowered.resident):
        if name in places:
          start, _ = lowered.flow.carry[i]
          value = lowered.flow.values[start]
          layout = place.layout_at_rest(value)
          if start in hosted:
            layout = place.layout(value, is_hosted=True)
          layouts.setdefault(i, {})[name] = layout
    for i, name, x in state.read(programs.state_shapes(lowered.flow), layouts):
      dtype = lowered.dtype(lowered.flow.carry[i][0], name)
      self.interpreters[name].state[i] = rounding.rounded(x, dtype)

  def start_writing(self, folder: pathlib.Path) -> Callable[[], None]:
    """Starts to write the carried values that these places own.

    Args:
      folder: of this part of the state, see `state_files.start_writing`.
    """
    self.wait()
    arrays = {leaf.name: x for leaf, x in self._owned() if not leaf.is_frozen}
    return state_files.start_writing(folder, arrays)

  def checksums(self) -> dict[str, int]:
    """As `Runtime`, of the values that these places own."""
    self.wait()
    frozen = {leaf.key: x for leaf, x in self._owned() if leaf.is_frozen}
    return frozen_weights.checksums(frozen)

  def _owned(self) -> list[tuple[state_files.Leaf, jax.Array]]:
    leaves = state_files.leaves(self.lowered['step'].flow.carry_tree)
    return [(leaves[i], x) for i, x in self.leaves().items()]

  def leaves(self) -> dict[int, jax.Array]:
    """Carried values that these places own, by number in the carry.

    The first place that holds a value owns it. A step overwrites these arrays,
    but for those of places that hold them rounded.
    """
    lowered, found = self.lowered['step'], {}
    for i, (first, *_) in enumerate(lowered.resident):
      if first in self.interpreters:
        v, x = lowered.flow.carry[i][0], self.interpreters[first].state[i]
        is_rounded = v in lowered.rounded[()][first]
        dtype = lowered.flow.values[v].dtype if is_rounded else None
        found[i] = rounding.rounded(x, dtype)
    return found

  def wait(self):
    """Blocks until every place has finished all submitted calls.

    Raises:
      StageError: if one of them failed.
    """
    for interpreter in self.interpreters.values():
      interpreter.wait()
    if self.failure:
      raise self.failure

  def close(self):
    """Ends the threads, each after its current instruction."""
    self.fail(RuntimeError('The runtime was closed.'))
    for interpreter in self.interpreters.values():
      interpreter.close()

  def compile(self, name: str):
    """Starts compiling every stage of a flow, without blocking.

    For CPUs one at a time: XLA's compiler for them already uses all cores. Two
    at once were no faster, and took up to 1.5 times as much memory
    (`experiments/compare_trl`).
    """
    if name in self._compiled:
      return
    pool = futures.ThreadPoolExecutor(
      1 if jax.default_backend() == 'cpu' else 2
    )
    self._compiled[name] = {
      (loop, op.node): pool.submit(
        place.compile,
        flow,
        flow.nodes[op.node],
        op.donate,
        passed,
        dict(op.streamed),
        self.lowered[name].rounded[loop][place.name],
      )
      for loop, place, flow, op, passed in self._stage_calls(name)
    }
    pool.shutdown(wait=False)

  def submit_flow(
    self,
    name: str,
    step: int,
    inputs,
    remaining: recovery.Left = recovery.EVERYTHING,
  ) -> futures.Future:
    """Queues a call of a flow at every place, without blocking.

    Places take calls in the order of submission. A place may be calls ahead of
    another, as far as the values that it receives allow.

    Args:
      name: of the flow.
      step: number of the update.
      inputs: arrays, in the order of the flow's inputs.
      remaining: the instructions left to execute, if another process has
        executed some of the call.

    Returns:
      The future of the outputs that these places send, by value.
    """
    if self.failure:
      raise self.failure
    self.compile(name)
    lowered = self.lowered[name]
    own = [programs.outputs(lowered.programs[place]) for place in self.places]
    call = StepCall(
      name,
      step,
      inputs=dict(zip(lowered.flow.inputs, inputs, strict=True)),
      outputs={},
      missing=set().union(*own),
      done=futures.Future(),
      remaining=remaining,
    )
    if not call.missing:
      call.done.set_result({})
    for interpreter in self.interpreters.values():
      interpreter.submit(call)
    return call.done

  # The interpreters' side.

  def put_output(self, call: StepCall, v: int, x):
    """Stores an output of a call; the last one completes its future."""
    flow = self.lowered[call.flow].flow
    if call.flow == 'evaluate' and v in flow.constants:
      # Evaluations only read the state, and the next step overwrites it.
      x = jax.device_put(x, x.sharding, may_alias=False)
    with self._lock:
      call.outputs[v] = x
      call.missing.discard(v)
      if not call.missing and not call.done.done():
        call.done.set_result(call.outputs)

  def send(self, frame: StackFrame, v: int, source: str, target: str, x):
    """Sends a value to another place; does not wait for its receiver."""
    channel = frame.channel(v, source, target)
    dtype = self.lowered[frame.call.flow].dtype(v, target, frame.loop)
    x = rounding.rounded(x, dtype)
    if target in self.places:
      x = self.places[target].store(frame.flow.values[v], x)
      self.mailbox.put(channel, x)
    else:
      self.send_remote(channel, x)

  def send_remote(self, channel: base.Channel, x):
    """Sends a value to a place of another process."""
    raise NotImplementedError(
      f'Place {channel.target!r} is not in this process.'
    )

  def has_arrived(self, frame: StackFrame, v: int, source: str, target: str):
    """Whether `receive` would return at once."""
    return self.mailbox.has(frame.channel(v, source, target))

  def receive(self, frame: StackFrame, v: int, source: str, target: str):
    """The next value from another place, laid out; blocks until it arrives."""
    channel = frame.channel(v, source, target)
    try:
      x = self.mailbox.get(channel, self.receive_timeout)
    except base.ReceiveTimeoutError as error:
      name = frame.flow.values[v].name
      raise base.StageError(
        f'{error}, {name}, in {frame.where}: that place hangs, or takes longer '
        'than `receive_timeout` allows.'
      ) from None
    return self.lay_out(x, frame.flow.values[v], target)

  def lay_out(self, x, value: graph_lib.Value, target: str):
    """A received value with the layout that its place expects."""
    del value, target  # `send` has laid it out.
    return x

  def wait_until_read(self, arrays):
    """Blocks until no reader needs arrays that are about to be overwritten."""
    del arrays  # Within a process JAX orders reads and writes.

  def compiled(self, frame: StackFrame, node: int):
    """The compiled call of a node; blocks until it is compiled."""
    return self._compiled[frame.call.flow][frame.loop, node].result()

  def fail(self, error: BaseException, call: StepCall | None = None):
    """Stops every place; the first failure wins.

    Args:
      error: what failed.
      call: the call in which it did, whose future is set to the failure.
    """
    failure = self.mailbox.fail(error)
    with self._lock:
      if call and not call.done.done():
        call.done.set_exception(failure)

  @property
  def failure(self) -> BaseException | None:
    """The first failure since a state was loaded."""
    return self.mailbox.failure
