"""The contract of the runtime: what its parts promise to each other.

A runtime carries out a plan. Two kinds exist, one with a thread per place in
this process and one with a process per place, and training does not know which
of them it drives.
"""

from collections.abc import Callable, Container, Mapping
from concurrent import futures
import contextlib
import pathlib
import types
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax

from planner.ir import graph as graph_lib
from planner.ir import plan as plan_lib
from rlinf_jax.runtime import programs
from rlinf_jax.runtime import timeline as timeline_lib
from rlinf_jax.state import state_readers


class StageError(RuntimeError):
  """A stage failed; the message names the stage, the place and the step."""


class ProcessDiedError(StageError):
  """The process of a place died; the run can go on from a checkpoint."""


class ReceiveTimeoutError(RuntimeError):
  """No value arrived within the time that a receiver may wait."""


class Channel(NamedTuple):
  """The route of one value of a flow from one place to another.

  A channel is a FIFO queue with one sender and one receiver. Lowering matches
  each send with a receive, so that nothing selects or reorders messages.

  Attributes:
    flow: name of the flow, such as 'step'.
    loop: node numbers of the enclosing loops, the outermost first.
    value: number of the value in the flow, or in the body of the loop.
    source: the place that sends.
    target: the place that receives.
  """

  flow: str
  loop: tuple[int, ...]
  value: int
  source: str
  target: str


@runtime_checkable
class Mailbox(Protocol):
  """The receiving ends of the channels that lead to places of one process.

  Any thread may put; the target place gets, from one thread at a time. Values
  of a channel arrive in the order in which they were put; channels are
  independent of each other.
  `put` never blocks. `get` blocks until a value or a failure arrives. A failure
  is sticky: until `clear`, every present and later receiver is given it.
  """

  failure: BaseException | None

  def put(self, channel: Channel, x: Any):
    """Appends a value to a channel; never blocks."""

  def has(self, channel: Channel) -> bool:
    """Whether `get` would return at once."""

  def get(self, channel: Channel, seconds: float | None = None) -> Any:
    """Removes and returns the oldest value of a channel.

    Args:
      channel: to receive from.
      seconds: to wait at most; None for no limit.

    Raises:
      BaseException: the failure that `fail` was given.
      ReceiveTimeoutError: if no value arrived in time.
    """

  def fail(self, error: BaseException) -> BaseException:
    """Wakes every receiver with the first failure; returns that failure."""

  def clear(self):
    """Discards the failure and all values; no thread may be receiving."""


@runtime_checkable
class Place(Protocol):
  """Devices seen as a mesh: how values lie on them and stages run on them.

  A place belongs to the thread that interprets its program, apart from
  `compile`, which any thread may call.
  """

  name: str

  def layout(
    self, value: graph_lib.Value, is_hosted: bool = False
  ) -> jax.sharding.Sharding:
    """The sharding of a value on this place while a stage uses it.

    Args:
      value: the value.
      is_hosted: whether it stays in the memory of the host.
    """

  def layout_at_rest(self, value: graph_lib.Value) -> jax.sharding.Sharding:
    """The sharding of a value that no stage is about to read."""

  def put(self, value: graph_lib.Value, x: Any) -> jax.Array:
    """`x` with the layout of `value`."""

  def store(self, value: graph_lib.Value, x: Any) -> jax.Array:
    """`x` with the layout at rest of `value`."""

  def compile(
    self,
    flow: graph_lib.Flow,
    node: graph_lib.Node,
    donate: Container[int] = (),
    passed: Container[int] | None = None,
    streamed: Mapping[int, int] = types.MappingProxyType({}),
    rounded: Mapping[int, int] = types.MappingProxyType({}),
  ) -> Any:
    """A function from the leaves that `node` reads to those that it writes.

    Args:
      flow: the flow that the node belongs to.
      node: the call of a stage.
      donate: numbers of values whose memory the call may reuse.
      passed: numbers of values that instructions other than calls read or
        write; None for all.
      streamed: values that it reads in host memory, and what it writes there in
        place of each.
      rounded: what this place holds in place of values that it reads.
    """

  def check_node(self, flow: graph_lib.Flow, node: graph_lib.Node):
    """Raises ValueError if devices cannot share a node's rows or its model."""

  def ambient(self) -> contextlib.AbstractContextManager:
    """The context of this place's mesh."""


@runtime_checkable
class Runtime(Protocol):
  """A plan in execution: its places, and the state that steps carry.

  One thread drives a runtime: it calls `start`, then `submit`, `step`,
  `evaluate` and `start_writing` in any order, and `close` at the end. Calls
  take effect in the order in which they were made, so `start_writing` after
  `submit` writes the state after that step. The carried state is with the
  places: the caller is given none of it, and a step overwrites it.

  The first failure stops every place. From then on all methods that run
  something raise it, until `start` starts afresh.

  Attributes:
    plan: the plan in execution.
    lowered: by name, 'step' and possibly 'evaluate': their programs.
    timeline: what ran when.
    steps: number of the last step submitted; `start` sets it.
  """

  plan: plan_lib.Plan
  lowered: Mapping[str, programs.Lowered]
  timeline: timeline_lib.Timeline
  steps: int

  def start(self, state: state_readers.StateReader, steps: int = 0):
    """Has every place read what it holds, and clears an earlier failure.

    Args:
      state: reads the state of the workflow.
      steps: updates that led to it.
    """

  def start_writing(self, folder: pathlib.Path) -> Callable[[], None]:
    """Starts to write the state after all submitted steps.

    Every place writes what it owns, as `state_files` does; frozen parameters
    are left out. Steps may go on at once.

    Args:
      folder: an empty folder of the state.

    Returns:
      A function that blocks until all is written. When it returns or raises,
      writing has ended everywhere.
    """

  def checksums(self) -> dict[str, int]:
    """A checksum of each frozen parameter, by its key (`frozen_weights`)."""

  def submit(self, batch, key) -> futures.Future:
    """Starts a step; returns the future of its info, without blocking.

    Steps overlap as far as the values that one needs of another allow.
    """

  def step(self, batch, key):
    """Runs a step to its end; returns its info."""

  def evaluate(self, batch, key):
    """Evaluates the state as it is, to the end; returns the info."""

  def compile(self, name: str):
    """Starts compiling every stage of a flow, without blocking."""

  def wait(self):
    """Blocks until every place has done all that was submitted.

    Raises:
      StageError: if a stage or a process failed.
    """

  def close(self):
    """Ends threads and processes; nothing can be run afterwards."""

  def transport(self, source: str, target: str, value: graph_lib.Value) -> str:
    """Names the transport of a value from place to place, for people."""

  def moved(self) -> dict[tuple[str, str], tuple[int, float]]:
    """Bytes and seconds of what left processes, by (source, target)."""

  def notices(self) -> list[str]:
    """Lines for people, such as recoveries, since the last call."""
