"""Counts arithmetic, traffic, memory and partial sums by walking a jaxpr.

Only the fields of jaxprs are used, so this module does not import JAX.

A variable is either in memory or *fused*: it is recomputed from its sources
whenever it is read, without traffic of its own. It is stored when a kernel that
cannot be fused reads it, or when it has too many sources.
"""

import collections
from collections.abc import Set
import math

from planner.costs.work import Work
from planner.counting import (
  allocation,
  kernels,
  loops,
  needed,
  primitives,
  trip_counts,
  variables,
)

# The name that `sharding.row_map` gives to what it maps.
SCOPE = 'map_rows'
SOURCES = 8  # A fused chain has at most so many sources.


class WorkCounter(loops.LoopCounter):
  """Counts the work of a program, or of a loop's body.

  With a `divisions.Division`, bytes are those of one device of a mesh. FLOPs
  are always those of all devices.
  """

  def work(self) -> Work:
    self.narrow_tables(max(self.matmul, key=self.matmul.get, default=None))
    peaks = self.peaks()
    return Work(
      flops=self.flops,
      matmul=dict(self.matmul),
      bytes_moved=self.moved,
      bytes_alive=peaks.one,
      bytes_gathered=peaks.gathered,
      bytes_sharded=peaks.sharded,
      kernels=self.kernels,
      partial=dict(self.partial),
      turns=self.turns,
      reads=dict(enumerate(self.reads.values())),
    )

  # Programs.

  def inline(
    self, jaxpr, args, unread: Set[int] = frozenset()
  ) -> list[variables.Variable]:
    """Walks a jaxpr; returns its results as abstract values.

    Args:
      jaxpr: the program.
      args: its arguments.
      unread: positions of results that are not read, and have no bytes then.
    """
    consts = [None] * len(jaxpr.constvars)
    if hasattr(jaxpr, 'jaxpr'):
      consts, jaxpr = jaxpr.consts, jaxpr.jaxpr
    known = dict(zip(jaxpr.invars, args, strict=True))
    for var, const in zip(jaxpr.constvars, consts, strict=True):
      known[var] = self.argument(var.aval)
      known[var].constant = trip_counts.number(const)

    def look(atom):
      if trip_counts.is_literal(atom):
        return variables.Variable(
          0.0, {}, constant=trip_counts.number(atom.val)
        )
      return known[atom]

    equations = needed.equations(jaxpr, unread)
    readers = collections.Counter(
      id(x) for eqn, _ in equations for x in eqn.invars
    )
    for eqn, dead in equations:
      self.now, self.unread, self.readers = self.now + 1, dead, readers
      made = self._in_scope(eqn, [look(x) for x in eqn.invars])
      known |= zip(eqn.outvars, made, strict=True)
    return [
      variables.NOTHING if i in unread else look(x)
      for i, x in enumerate(jaxpr.outvars)
    ]

  def _in_scope(self, eqn, args) -> list[variables.Variable]:
    """Takes a step, and gathers parameters in full where a scope says so."""
    if self.without and self.without in str(eqn.source_info.name_stack):
      return [variables.NOTHING for _ in eqn.outvars]
    if self.whole or SCOPE not in str(eqn.source_info.name_stack):
      return self.step(eqn, args)
    self.whole = True
    for x, variable in zip(eqn.invars, args, strict=True):
      if variable.shape in self.parameters:
        self.gather(variable, x.aval.dtype)
        self.use(variable)
    made = self.step(eqn, args)
    self.whole = False
    return made

  def step(self, eqn, args) -> list[variables.Variable]:
    name = eqn.primitive.name
    if name in primitives.CONTROL:
      return getattr(self, f'_{name}')(eqn, args)
    if name in kernels.PRIMITIVES:
      return kernels.count(self, eqn, args)
    for key in primitives.CALLS:
      if key in eqn.params and not name.startswith('reduce'):
        return self.inline(eqn.params[key], args, self.unread)
    if name in primitives.VIEWS:
      return self._view(eqn, args)
    sums = [variable.partial for variable in args if variable.partial]
    if name in ('add', 'add_any'):
      args = self._divided_alike(args)
    if name in ('add', 'add_any') and len(sums) == len(args):
      self._add_up(*sums)
    elif name != 'convert_element_type':
      for one in sums:
        one.open = False
    if name in primitives.HEAVY or name.startswith('reduce_window'):
      return self._heavy(eqn, args)
    if name.startswith(('gather', 'scatter', 'dynamic_update_slice')):
      return self._indexed(eqn, args)
    return self._fused(eqn, args)

  def _divided_alike(self, args):
    """Divides a sum that began with zeros as what it is added to.

    The gradient of a look-up, such as that of a token's own logit, is one.
    """
    divided = next((x.divided for x in args if any(x.divided or ())), None)
    return [
      self.redivide(x, divided)
      if divided and x.shape == args[0].shape and self._began_with_zeros(x)
      else x
      for x in args
    ]

  def _began_with_zeros(self, variable) -> bool:
    return not any(variable.divided or ()) and any(
      buffer.is_scattered for buffer in variable.sources
    )

  def _view(self, eqn, args):
    if len(eqn.outvars) > 1:  # A barrier, which all of them pass in memory.
      for variable in args:
        self.copy_slice(variable)
      return args
    (divided,) = self.divided(eqn, args)
    variable, size = args[0], self.local(eqn.outvars[0].aval, divided)
    if eqn.primitive.name == 'sharding_constraint' and (
      divided != variable.divided
    ):
      return [self._redivided(eqn, variable, divided)]
    sources = variable.sources
    if not variable.fused:
      sources = {b: min(n, size) for b, n in sources.items()}
    letters = variable.letters and primitives.letters_of(eqn, variable.letters)
    return [
      variables.Variable(
        size,
        sources,
        variable.fused,
        letters,
        variable.partial,
        variable.constant,
        divided,
        eqn.outvars[0].aval.shape,
      )
    ]

  def _redivided(self, eqn, variable, divided) -> variables.Variable:
    """Counts a gather or a scatter, which make an array of their own."""
    self.store(variable)
    self.read(variable)
    made = self.stored(eqn.outvars[0].aval, divided)
    before, after = (
      {axis for axes in some for axis in axes}
      for some in (variable.divided, divided)
    )
    # In a ring, a gather or a scatter sends half of what adding up does.
    for axis in before - after:
      self._add_partial([self.division.letter_of(axis)], 1, made.size / 2)
    if variable.partial and variable.partial.open:
      scattered = [
        letter
        for letter in variable.partial.letters
        if after.intersection(self.division.layout.axes_of(letter))
      ]
      half = variable.partial.size / 2
      self._add_partial(scattered, 0, -half, half)
      variable.partial.open = False
    return made

  def _fused(self, eqn, args):
    """Counts elementwise arithmetic and reductions, which are fused."""
    name = eqn.primitive.name
    reduces = name.startswith(primitives.REDUCES)
    touched = eqn.invars if reduces else eqn.outvars
    size = max((getattr(x.aval, 'size', 0) for x in touched), default=0)
    if name not in primitives.MOVES:
      self.flops += size * primitives.OPERATIONS.get(name, 1)
    for variable in args:
      large = [b for b in variable.sources if b.size > allocation.SCALAR]
      if variable.fused and len(large) > SOURCES:
        self.store(variable)
    sources = {}
    for variable in args:
      for buffer, n in variable.sources.items():
        sources[buffer] = max(n, sources.get(buffer, 0.0))
    made = []
    for var, divided in zip(eqn.outvars, self.divided(eqn, args), strict=True):
      size = self.local(var.aval, divided)
      one = variables.Variable(
        size, dict(sources), True, divided=divided, shape=var.aval.shape
      )
      if reduces:
        self.store(one)
      made.append(one)
    if name == 'convert_element_type':
      made[0].letters, made[0].partial = args[0].letters, args[0].partial
      made[0].constant = args[0].constant
      # Each product converts its operands. XLA converts an array once.
      dtype = eqn.outvars[0].aval.dtype
      made[0] = args[0].converted.setdefault(dtype, made[0])
      if self._rounds_weight(eqn, args[0], made[0]):
        self.store(made[0])
      elif self.readers[id(eqn.invars[0])] == 1:
        self.note_rounding(args[0], made[0])
    elif name == 'broadcast_in_dim':
      made[0].letters = args[0].letters and primitives.letters_of(
        eqn, args[0].letters
      )
    elif name in ('add', 'add_any'):
      some = args[0].partial
      made[0].partial = some if some and some.open else None
      # Weights to which an adapter is added are divided as they were.
      made[0].letters = next(
        (x.letters for x in args if x.letters and x.shape == made[0].shape),
        None,
      )
      self._accumulate(eqn, args, made[0])
    return made

  def _rounds_weight(self, eqn, wide, narrow) -> bool:
    """Whether a weight with its adapter added is only rounded.

    XLA adds and rounds in one kernel, and does so before it makes others, as
    the product of the adapter takes more memory than what is left of it. So it
    does with a weight that was expanded, which is no argument.
    """
    if self.readers[id(eqn.invars[0])] != 1 or narrow.size >= wide.size:
      return False
    products = [b for b in wide.sources if b.is_product and not b.outside]
    large = [b for b in wide.sources if b.size > allocation.SCALAR]
    return bool(products) and (
      bool(wide.letters)
      or len(large) > 1
      and any(b.size > narrow.size for b in products)
    )

  def _accumulate(self, eqn, args, total: variables.Variable):
    """Adds a product to another, or to a parameter, as it is computed.

    XLA has cuBLAS add to what is there, as for a weight and its adapter. The
    sum takes the place of the last product, and the other need not be kept.
    """
    if self.platform != 'gpu':
      return
    products = []
    for var, one in zip(eqn.invars, args, strict=True):
      large = [b for b in one.sources if b.size > allocation.SCALAR]
      if one.shape != total.shape or len(large) != 1:
        return
      if not large[0].outside:
        if not large[0].is_product or self.readers[id(var)] > 1:
          return
        products += large
    last = max(products, key=lambda b: b.born, default=None)
    if last and last.size == total.size:
      self.moved += sum(b.size for b in total.sources if b is not last)
      total.sources, total.fused = {last: total.size}, False

  def _heavy(self, eqn, args):
    name = eqn.primitive.name
    fused = [variable for variable in args if variable.fused]
    for variable in fused:
      self.store(variable)
    self.now += bool(fused)  # Their sources may be freed by then.
    self.moved += sum(self.read(variable) for variable in args)
    made = self.stored_results(eqn, args)
    self.moved += sum(one.size for one in made)
    self.kernels += 1
    size = max(getattr(var.aval, 'size', 0) for var in eqn.invars)
    if name in ('dot_general', 'conv_general_dilated', 'ragged_dot_general'):
      for variable in args:
        self.use(variable)
      flops = primitives.product_flops(eqn)
      self.add_matmul(str(eqn.invars[0].aval.dtype), flops)
      self.flops += flops
    else:
      deep = name in ('sort', 'top_k', *primitives.SCANS)
      self.flops += size * (max(1, math.ceil(math.log2(size + 1))) ** deep)
    if name == 'dot_general':
      over, _ = eqn.params['dimension_numbers']
      for buffer in made[0].sources:
        buffer.is_product = True
      self._sum_over(made[0], zip(args, over, strict=True))
    return made

  def add_matmul(self, kind: str, flops: float):
    self.matmul[kind] = self.matmul.get(kind, 0.0) + flops

  def stored_results(self, eqn, args):
    return [
      self.stored(var.aval, divided)
      for var, divided in zip(eqn.outvars, self.divided(eqn, args), strict=True)
    ]

  def _indexed(self, eqn, args):
    """Counts reads or writes of parts of an array, in place if possible."""
    name, out = eqn.primitive.name, eqn.outvars[0].aval
    (divided,) = self.divided(eqn, args)
    self.kernels += 1
    if name == 'gather':
      self.store(args[0])
      self.moved += sum(self.read(variable) for variable in args[1:])
      self.read(args[0])
      if self.whole:
        self.copy_table(args[0], eqn.invars[0].aval.dtype)
      made = self.stored(out, divided)
      self.moved += 2 * made.size
      over = eqn.params['dimension_numbers'].start_index_map
      self._sum_over(made, [(args[0], over)])
      return [made]
    self.store(args[0])
    updates = args[1 if name == 'dynamic_update_slice' else 2]
    self.moved += sum(self.read(variable) for variable in args[1:])
    # A scatter also reads what it adds to.
    self.moved += updates.size * (1 + (name != 'dynamic_update_slice'))
    self.read(args[0])
    if any(b.outside for b in args[0].sources):
      # An argument is copied, not overwritten.
      made = self.stored(out, divided)
      self.moved += 2 * made.size
      return [made]
    if name != 'dynamic_update_slice':
      self.flops += getattr(eqn.invars[2].aval, 'size', 0)
      for buffer in args[0].sources:
        buffer.is_scattered = True
        buffer.is_table = self.whole and buffer.shape in self.parameters
    size = self.local(out, divided)
    sources = dict(args[0].sources)
    return [variables.Variable(size, sources, divided=divided, shape=out.shape)]

  def _sum_over(self, made: variables.Variable, over):
    """Records a sum over dimensions of some variables."""
    letters = [
      variable.letters[axis]
      for variable, axes in over
      for axis in (axes if variable.letters else ())
      if variable.letters[axis]
    ]
    if letters:
      self._add_partial(letters, 1, made.size)
      # A sum over a dimension that no device shares, as an adapter's, is done.
      if self.division is None or self.division.shares(letters):
        made.partial = variables.PartialSum(letters, made.size)

  def _add_up(self, one: variables.PartialSum, other: variables.PartialSum):
    """Adds two partial sums, which then need a single all-reduce."""
    if one.open and other.open and one is not other:
      self._add_partial(other.letters, -1, -other.size)
    else:
      one.open = False
    other.open = False

  def _add_partial(self, letters, n: int, size: float, scattered: float = 0.0):
    some = n, size, scattered
    for letter in letters:
      have = self.partial.get(letter, (0.0, 0.0, 0.0))
      self.partial[letter] = tuple(
        a + b for a, b in zip(have, some, strict=True)
      )
