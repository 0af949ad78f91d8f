"""What programs are made of: twelve kinds of instruction.

Values go from place to place over links. Two ends are no place: inputs come
from the `SOURCE` and outputs go to the `SINK`, which is whoever calls the step,
or, in the body of a loop, the loop.
"""

from typing import NamedTuple

SOURCE, SINK = 'source', 'sink'


class Run(NamedTuple):
  """Call stage node `node`, which may overwrite the values in `donate`."""

  node: int
  donate: tuple[int, ...] = ()


class Begin(NamedTuple):
  """Begin the call of stage node `node`, which its `Run` will wait for."""

  node: int


class Send(NamedTuple):
  """Hand `value` to `place`."""

  value: int
  place: str


class Recv(NamedTuple):
  """Wait for `value` from `place`."""

  value: int
  place: str


class Keep(NamedTuple):
  """When all else is done, let `end` become the next step's `start`."""

  end: int
  start: int


class Drop(NamedTuple):
  """Forget `value`."""

  value: int


class Offload(NamedTuple):
  """Move `value` from device to host memory."""

  value: int


class Restore(NamedTuple):
  """Move `value` from host to device memory."""

  value: int


class Acquire(NamedTuple):
  """Have `values` in the memory of devices that are shared.

  Where the place has let the devices go it waits for its turn: until nobody
  has them, and nobody of a smaller `rank` waits.
  """

  devices: tuple[int, ...]
  rank: int
  values: tuple[int, ...]


class Release(NamedTuple):
  """Let shared devices go, unless `value` has already come from `place`.

  All that the place holds moves to host memory first. Without a value it is the
  end of a step.
  """

  value: int | None = None
  place: str = SINK


class Until(NamedTuple):
  """Let this round of a loop be the last if `value` is true."""

  value: int


class Repeat(NamedTuple):
  """Do this place's part of loop node `node` again and again.

  The body has values of its own. A place that no value leaves or enters by this
  instruction may have a part all the same: in between.

  Attributes:
    node: of the flow; its `body` is what `program` is of.
    program: of this place, for one round.
    carry: `(value, start, end)`: what becomes the body's `start` before the
      first round, and what that is called after the last.
    given: `(value, input)`: what the body's inputs are, in every round.
    donate: values that may be overwritten; others of `carry` are copied.
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
  """Values that it keeps, moves or hands on, rather than calls a stage with."""
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
