"""Memory and traffic of a program, as its variables are stored and read."""

import dataclasses
from typing import NamedTuple

import numpy as np

from planner.costs.mesh import collectives
from planner.counting import divisions, merged_kernels, variables
from planner.counting.merged_kernels import SCALAR


class Peaks(NamedTuple):
  """The most bytes of intermediate values at once.

  Attributes:
    one: those of a device that holds all parameters.
    gathered: those of one that gathers them, with all of each array of the
      shape of a parameter.
    sharded: the same without those of these arrays that devices share.
  """

  one: float
  gathered: float
  sharded: float


class Allocation:
  """The buffers of a program on one device, of which time is an equation.

  Attributes:
    division: divides the arrays among devices; None for one device alone.
    parameters: shapes of the parameters that devices of rows may share.
    whole: whether the equation under way is in `sharding.row_map.map_rows`,
      which gathers parameters in full, and adds up their gradients.
    platform: of the compiler, as JAX names it. That of 'gpu' merges elementwise
      kernels, as `merged_kernels` says. That of 'tpu' gathers parameters in the
      type of products, and copies the embedding, see `copy_table`.
    now: number of the equation under way.
    buffers: all buffers so far.
    within: peaks inside a loop, by its time.
    moved: bytes to and from memory so far.
    kernels: number of kernels so far.
    reads: as `work.Work.reads` so far, by the buffer of an argument.
  """

  def __init__(self, division: divisions.Division | None):
    self.division, self.parameters, self.whole = division, frozenset(), False
    self.platform = None
    self.now, self.buffers, self.within = 0, [], {}
    self._gathered, self._arguments, self._tables = {}, set(), []
    self._read = 0, []
    self.moved = self.kernels = 0.0
    self.reads, self._used = {}, set()

  def peaks(self) -> Peaks:
    """Returns the peak bytes of its buffers and of loops' bodies."""
    buffers = self.buffers
    if self.platform == 'gpu':
      rounded = merged_kernels.rounded(buffers)
      merged_kernels.merge(buffers)
      merged_kernels.place(rounded, buffers)
      buffers = buffers + rounded
    for buffer in buffers:
      for source in buffer.sources:
        source.last = max(source.last, buffer.born)
    # An equation has two halves, see `variables.Buffer.is_early`.
    changes = np.zeros((3, 2 * self.now + 6))
    for buffer in buffers:
      inside = not buffer.outside
      counts = np.array(
        [
          inside,
          inside or buffer.is_whole,
          inside and not buffer.is_sharded or buffer.is_whole,
        ]
      )
      born = 2 * buffer.born + (not buffer.is_early)
      last = 2 * buffer.last + (not buffer.ends_early)
      changes[:, born] += counts * buffer.size
      changes[:, last + 1] -= counts * buffer.size
    for when, sizes in self.within.items():
      changes[:, 2 * when] += sizes
      changes[:, 2 * when + 2] -= sizes
    return Peaks(*np.cumsum(changes, 1).max(1, initial=0.0).tolist())

  def note_rounding(self, wide: variables.Variable, narrow):
    """Records that a product is read in a narrower type alone."""
    if wide.fused or narrow.size >= wide.size or len(wide.sources) != 1:
      return
    (buffer,) = wide.sources
    if buffer.is_product and not buffer.outside and buffer.size == wide.size:
      buffer.rounded = narrow.size

  def gather(self, variable: variables.Variable, dtype):
    """Records that devices which share an argument have it in full now."""
    for given in self._arguments.intersection(variable.sources):
      if given not in self._gathered:
        self._gathered[given] = self._whole(variable.size, variable.shape)
        self._tables.append((self._gathered[given], dtype))
      self._gathered[given].last = self.now

  def _whole(self, size: float, shape) -> variables.Buffer:
    """Returns a new buffer of what devices that share rows have in full."""
    buffer = self.made(size, shape, outside=True)
    buffer.is_whole = True
    return buffer

  def use(self, variable: variables.Variable):
    """Records that something outside of loops needs an argument as a whole.

    An array that is gathered for it is there for all of the program.
    """
    for given in self.reads.keys() & variable.origins - self._used:
      self._used.add(given)
      self.reads[given] += 1.0

  def copy_table(self, variable: variables.Variable, dtype=None):
    """Records that a TPU copies a whole parameter to read or write its rows.

    Devices share columns of it. Gathered columns lie beside each other, and so
    do those of a sum that is scattered, but a row is read as a whole. Where the
    output layer is the same parameter, its sum is added in the copy.

    Args:
      variable: the parameter, or the sum of its gradient.
      dtype: of a parameter, as in `gather`.
    """
    if self.platform == 'tpu' and variable.shape in self.parameters:
      for given in self._gathered.keys() & variable.sources:
        self._gathered[given].last = self.now
      copy = self._whole(variable.size, variable.shape)
      if dtype is not None:
        self._tables.append((copy, dtype))

  def copy_sums(self, made):
    """Records copies of those results that rows of a table were added to."""
    for variable in made:
      for buffer in variable.sources:
        if any(one.is_table for one in (buffer, *buffer.sources)):
          self.copy_table(variable)

  def narrow_tables(self, dtype: str | None):
    """Counts gathered parameters in the type of products, for a TPU.

    XLA for GPUs converts them back to their own type after they are gathered.
    """
    if self.platform == 'tpu' and dtype is not None:
      for buffer, own in self._tables:
        buffer.size *= min(1.0, collectives.item_bytes(dtype) / own.itemsize)
    self._tables = []

  def made(
    self, size: float, shape, outside=False, sources=None
  ) -> variables.Buffer:
    """Returns a new buffer.

    Args:
      size: its bytes.
      shape: its dimensions.
      outside: as `variables.Buffer` has it.
      sources: likewise; None if it depends on what is read just now.
    """
    buffer = variables.Buffer(size, self.now, outside, shape)
    buffer.sources = sources or {}
    needs = self._read_now() if sources is None else sources
    buffer.origins = frozenset().union(*(one.origins for one in sources or ()))
    buffer.follows(len(self.buffers), needs)
    if shape in self.parameters:
      buffer.is_whole, buffer.is_sharded = self.whole, not self.whole
    self.buffers.append(buffer)
    return buffer

  def argument(self, aval, letters=None, divided=None) -> variables.Variable:
    letters = tuple(letters) if letters is not None else None
    if self.division and divided is None:
      divided = self.division.argument(letters, getattr(aval, 'shape', ()))
    variable = self.stored(aval, divided, outside=True)
    variable.letters = letters
    for buffer in variable.sources:
      buffer.origins = frozenset([buffer])
      self.reads[buffer] = 0.0
    self._arguments.update(variable.sources)
    return variable

  def stored(self, aval, divided=None, outside=False) -> variables.Variable:
    size, shape = self.local(aval, divided), getattr(aval, 'shape', ())
    buffer = self.made(size, shape, outside)
    return variables.Variable(
      size, {buffer: size}, divided=divided, shape=shape
    )

  def local(self, aval, divided) -> float:
    """Returns the bytes of an array on one device."""
    size = variables.size_of(aval)
    return size / self.division.ways(divided) if divided else size

  def divided(self, eqn, args) -> list:
    """Returns how the results of an equation are divided; Nones if none is."""
    if not self.division:
      return [None] * len(eqn.outvars)
    given = [
      one.divided or divisions.whole(getattr(x.aval, 'shape', ()))
      for x, one in zip(eqn.invars, args, strict=True)
    ]
    return self.division.results(eqn, given)

  def read(self, variable: variables.Variable) -> float:
    """Records that a variable's sources are read now; returns their bytes."""
    for buffer in variable.sources:
      buffer.last = max(buffer.last, self.now)
    self._read_now().extend(variable.sources)
    return sum(variable.sources.values())

  def _read_now(self) -> list[variables.Buffer]:
    """Returns the buffers that the equation under way has read so far."""
    if self._read[0] != self.now:
      self._read = self.now, []
    return self._read[1]

  def store(self, variable: variables.Variable):
    """Stores a fused variable in memory."""
    if not variable.fused:
      return
    self.moved += sum(variable.sources.values()) + variable.size
    self.kernels += variable.size > SCALAR
    buffer = self.made(variable.size, variable.shape, False, variable.sources)
    if self._is_gathered_so(variable):
      buffer.size = 0.0
    variable.sources, variable.fused = {buffer: variable.size}, False

  def _is_gathered_so(self, variable: variables.Variable) -> bool:
    """Whether a TPU has it already, as parameters come in a product's type."""
    return (
      self.platform == 'tpu'
      and self.whole
      and variable.shape in self.parameters
      and 0 < len(variable.sources)
      and self._arguments.issuperset(variable.sources)
    )

  def hand_over(self, variable: variables.Variable):
    """Stores a variable in memory of its own, for a loop to read."""
    self.store(variable)
    self.copy_slice(variable)
    self.read(variable)

  def copy_slice(self, variable: variables.Variable):
    """Copies a slice of a larger buffer to memory of its own."""
    if variable.fused:
      return
    if any(n < buffer.size for buffer, n in variable.sources.items()):
      variable.fused = True
      self.store(variable)

  def redivide(self, variable, divided) -> variables.Variable:
    """Returns a variable as if it was divided from the start."""
    size = variable.size / self.division.ways(divided)
    for buffer in variable.sources:
      buffer.size = size if not buffer.outside else buffer.size
    sources = dict.fromkeys(variable.sources, size)
    return dataclasses.replace(
      variable, size=size, sources=sources, divided=divided
    )

  def store_all(self, made):
    """Stores variables in memory; shared sources are read only once."""
    sources = {}
    for variable in made:
      if variable.fused:
        for buffer, n in variable.sources.items():
          sources[buffer] = max(n, sources.get(buffer, 0.0))
        self.moved -= sum(variable.sources.values())
        self.store(variable)
    self.moved += sum(sources.values())

  def hand_out(self, made, args):
    """Stores results in memory, which belongs to the caller."""
    self.store_all(made)
    for variable in (variable for variable in made if variable not in args):
      if any(
        b.outside for b in variable.sources
      ):  # A slice of an argument is copied.
        self.moved += self.read(variable) + variable.size
        self.kernels += 1
      for buffer in variable.sources:
        buffer.outside, buffer.last = True, self.now
    self.copy_sums(made)
