"""Memory and traffic of a program, as its variables are stored and read."""

import dataclasses

import numpy as np

from planner.counting import divisions, variables

SCALAR = 16  # Bytes: smaller arrays need no kernel of their own.


class Allocation:
  """The buffers of a program on one device, of which time is an equation.

  Attributes:
    division: divides the arrays among devices; None for one device alone.
    now: number of the equation under way.
    buffers: all buffers so far.
    within: peak bytes inside a loop, by its time.
    moved: bytes to and from memory so far.
    kernels: number of kernels so far.
  """

  def __init__(self, division: divisions.Division | None):
    self.division = division
    self.now, self.buffers, self.within = 0, [], {}
    self.moved = self.kernels = 0.0

  def peak(self) -> float:
    """Returns the peak bytes of its buffers and of loops' bodies."""
    change = np.zeros(self.now + 3)
    for buffer in self.buffers:
      if not buffer.outside:
        change[buffer.born] += buffer.size
        change[buffer.last + 1] -= buffer.size
    for when, size in self.within.items():
      change[when] += size
      change[when + 1] -= size
    return float(np.cumsum(change).max(initial=0.0))

  def argument(self, aval, letters=None, divided=None) -> variables.Variable:
    letters = tuple(letters) if letters is not None else None
    if self.division and divided is None:
      divided = self.division.argument(letters, getattr(aval, 'shape', ()))
    variable = self.stored(aval, divided, outside=True)
    variable.letters = letters
    return variable

  def stored(self, aval, divided=None, outside=False) -> variables.Variable:
    size = self.local(aval, divided)
    buffer = variables.Buffer(size, self.now, outside)
    self.buffers.append(buffer)
    return variables.Variable(size, {buffer: size}, divided=divided)

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
    return sum(variable.sources.values())

  def store(self, variable: variables.Variable):
    """Stores a fused variable in memory."""
    if not variable.fused:
      return
    self.moved += self.read(variable) + variable.size
    self.kernels += variable.size > SCALAR
    buffer = variables.Buffer(variable.size, self.now)
    self.buffers.append(buffer)
    variable.sources, variable.fused = {buffer: variable.size}, False

  def hand_over(self, variable: variables.Variable):
    """Stores a variable in memory of its own, for a loop to read."""
    self.store(variable)
    if any(n < buffer.size for buffer, n in variable.sources.items()):
      variable.fused = True  # A slice of a larger buffer is copied.
      self.store(variable)
    self.read(variable)

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
        buffer.outside = True
