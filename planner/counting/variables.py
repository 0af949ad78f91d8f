"""Abstract values of the variables of a jaxpr: buffers and partial sums."""

import dataclasses


def size_of(aval) -> float:
  size = getattr(aval, 'size', 0)
  return float(size * aval.dtype.itemsize) if size else 0.0


class Buffer:
  """A buffer, with the first and last equation that uses it.

  Attributes:
    size: bytes.
    born: number of the first equation.
    last: number of the last one.
    outside: whether it is an argument or a result, which belongs to the caller.
    is_sharded: whether devices that shard parameters share it.
    is_whole: whether each of them has it in full, beside its part of a result.
    is_scattered: whether values are added to it where indices say.
    is_table: whether rows of a parameter that each device has in full are added
      to it.
    is_product: whether it is the result of a product of matrices.
    rounded: bytes of itself in a narrower type, in which alone it is read; 0
      otherwise.
    is_early: whether it is made before other arrays of its equation.
    ends_early: whether other arrays of its last equation are made after it.
    shape: its dimensions.
    sources: the buffers that it is computed of, and how many bytes of them, if
      it is the result of an elementwise kernel.
    origins: the arguments that it is, or is computed of element by element.
  """

  def __init__(self, size: float, born: int, outside: bool = False, shape=()):
    self.size, self.born, self.last = size, born, born
    self.outside, self.shape = outside, shape
    self.is_sharded = self.is_whole = False
    self.is_scattered = self.is_table = self.is_product = False
    self.rounded, self.is_early, self.ends_early = 0.0, False, False
    self.sources, self._bit, self._before = {}, 0, 0
    self.origins = frozenset()

  def follows(self, number: int, buffers):
    """Records that it is number `number`, and made after some buffers."""
    self._bit = 1 << number
    for buffer in buffers:
      self._before |= buffer._bit | buffer._before

  def waits_for(self, other: 'Buffer') -> bool:
    """Returns whether another buffer is needed to compute this one."""
    return bool(self._before & other._bit)


@dataclasses.dataclass(eq=False)
class PartialSum:
  """A sum over lettered dimensions; `open` until its value is read."""

  letters: list[str]
  size: float
  open: bool = True


@dataclasses.dataclass(eq=False)
class Variable:
  """The abstract value of a variable.

  Attributes:
    size: its bytes.
    sources: the buffers that must be read to compute it, and how many bytes.
    fused: whether it is recomputed from its sources when read.
    letters: the letters of its dimensions if it is a view of an argument.
    partial: the sum that it is, of which each device may have a part.
    constant: its number, if known.
    divided: the mesh axes that divide each of its dimensions; None where no
      mesh is given.
    shape: its dimensions, if it may be of the shape of a parameter.
    converted: itself in other types, by type.
  """

  size: float
  sources: dict
  fused: bool = False
  letters: tuple | None = None
  partial: 'PartialSum | None' = None
  constant: float | None = None
  divided: tuple | None = None
  shape: tuple | None = None
  converted: dict = dataclasses.field(default_factory=dict, init=False)

  @property
  def origins(self) -> set[Buffer]:
    """The arguments of which it is computed, element by element."""
    return {given for buffer in self.sources for given in buffer.origins}

  def laid_out(self, divided: tuple | None) -> 'Variable':
    """Returns what devices have as arrays that `divided` divides."""
    return dataclasses.replace(self, letters=None, divided=divided)


NOTHING = Variable(0.0, {})  # A result that nothing reads.
