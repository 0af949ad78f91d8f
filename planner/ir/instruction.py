"""The twelve kinds of instruction that programs consist of.

Values travel from place to place over links. Inputs come from the `SOURCE` and
outputs go to the `SINK`, which are not places: they stand for the caller of the
step, or for the loop around a loop's body.
"""

from typing import NamedTuple

SOURCE, SINK = 'source', 'sink'


class Run(NamedTuple):
  """Calls node `node`, which may overwrite the values in `donate`.

  Attributes:
    node: index of the node in the flow.
    donate: values that the call may overwrite.
    streamed: pairs of a value that it reads in host memory, and the value that
      it writes there.
  """

  node: int
  donate: tuple[int, ...] = ()
  streamed: tuple[tuple[int, int], ...] = ()


class Begin(NamedTuple):
  """Starts node `node` asynchronously; its `Run` awaits the result."""

  node: int


class Send(NamedTuple):
  """Sends `value` to `place`."""

  value: int
  place: str


class Recv(NamedTuple):
  """Receives `value` from `place`, waiting for it if needed."""

  value: int
  place: str


class Keep(NamedTuple):
  """Makes `end` the value of `start` in the next step, at the end of this."""

  end: int
  start: int


class Drop(NamedTuple):
  """Deletes `value`."""

  value: int


class Offload(NamedTuple):
  """Moves `value` from device to host memory."""

  value: int


class Restore(NamedTuple):
  """Moves `value` from host to device memory."""

  value: int


class Acquire(NamedTuple):
  """Acquires shared devices, and restores `values` to their memory.

  A place that does not hold the devices waits until they are free and no place
  of smaller `rank` waits for them.
  """

  devices: tuple[int, ...]
  rank: int
  values: tuple[int, ...]


class Release(NamedTuple):
  """Releases shared devices, unless `value` has already arrived from `place`.

  All values of the place move to host memory first. Without `value`, the place
  releases the devices at the end of a step.
  """

  value: int | None = None
  place: str = SINK


class Until(NamedTuple):
  """Makes this round of a loop the last if `value` is true."""

  value: int


class Repeat(NamedTuple):
  """Repeats this place's part of loop node `node`.

  The body has ids of values of its own. A place may take part in a loop even if
  it neither provides nor receives values of the surrounding program.

  Attributes:
    node: index of the node in the flow; its `body` is lowered to `program`.
    program: the program of this place for one round.
    carry: triples `(value, start, end)`: `value` becomes the body's `start`
      before the first round, which becomes `end` after the last.
    given: pairs `(value, input)`: the body's inputs in every round.
    donate: values that may be overwritten; other values of `carry` are copied.
  """

  node: int
  program: tuple['Instruction', ...]
  carry: tuple[tuple[int, int, int], ...] = ()
  given: tuple[tuple[int, int], ...] = ()
  donate: tuple[int, ...] = ()

  @property
  def reads(self) -> tuple[int, ...]:
    return (*(v for v, _, _ in self.carry), *(v for v, _ in self.given))

  @property
  def writes(self) -> tuple[int, ...]:
    return tuple(end for _, _, end in self.carry)


Instruction = (
  Run
  | Begin
  | Send
  | Recv
  | Keep
  | Drop
  | Offload
  | Restore
  | Acquire
  | Release
  | Until
  | Repeat
)


def passed(op: Instruction) -> tuple[int, ...]:
  """Returns the values that an instruction keeps or moves."""
  match op:
    case Send(v) | Offload(v) | Restore(v) | Until(v):
      return (v,)
    case Keep(end, start):
      return end, start
    case Acquire(values=values):
      return values
    case Repeat():
      return op.reads + op.writes
    case Release(v) if v is not None:
      return (v,)
  return ()
