"""Counts arithmetic, traffic, memory and partial sums by walking a jaxpr.

Only the fields of jaxprs are used, so this module does not import JAX.

A variable is either in memory or *fused*: it is recomputed from its sources
whenever it is read, without traffic of its own. It is stored when a kernel that
cannot be fused reads it, or when it has too many sources.
"""

import dataclasses
import math

import numpy as np

from planner.costs.work import Work
from planner.counting import primitives, trip_counts, variables

SOURCES = 8  # A fused chain has at most so many sources.
SCALAR = 16  # Bytes: smaller arrays need no kernel of their own.


class WorkCounter:
  """Counts the work of a program, or of a loop's body."""

  def __init__(self, trips: int | None):
    self.trips = trips
    self.flops = self.moved = self.kernels = 0.0
    self.matmul, self.partial, self.turns = {}, {}, 0.0
    self.now, self.buffers, self.within = 0, [], {}

  def work(self) -> Work:
    return Work(
      flops=self.flops,
      matmul=dict(self.matmul),
      bytes_moved=self.moved,
      bytes_alive=self.peak(),
      kernels=self.kernels,
      partial=dict(self.partial),
      turns=self.turns,
    )

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

  # Variables.

  def argument(self, aval, letters=None) -> variables.Variable:
    variable = self.stored(aval, outside=True)
    variable.letters = tuple(letters) if letters is not None else None
    return variable

  def stored(self, aval, outside=False) -> variables.Variable:
    size = variables.size_of(aval)
    buffer = variables.Buffer(size, self.now, outside)
    self.buffers.append(buffer)
    return variables.Variable(size, {buffer: size})

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

  # Programs.

  def inline(self, jaxpr, args) -> list[variables.Variable]:
    """Walks a jaxpr; returns its results as abstract values."""
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

    for eqn in jaxpr.eqns:
      self.now += 1
      made = self.step(eqn, [look(x) for x in eqn.invars])
      known |= zip(eqn.outvars, made, strict=True)
    return [look(x) for x in jaxpr.outvars]

  def step(self, eqn, args) -> list[variables.Variable]:
    name = eqn.primitive.name
    if name in primitives.CONTROL:
      return getattr(self, f'_{name}')(eqn, args)
    if name == 'pallas_call':
      raise NotImplementedError(
        f'{eqn.params.get("name") or name} is a kernel that cannot be counted: '
        'give its stage measured seconds instead.'
      )
    for key in primitives.CALLS:
      if key in eqn.params and not name.startswith('reduce'):
        return self.inline(eqn.params[key], args)
    if name in primitives.VIEWS:
      return self._view(eqn, args)
    sums = [variable.partial for variable in args if variable.partial]
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

  def _view(self, eqn, args):
    if len(eqn.outvars) > 1:  # A barrier.
      return args
    variable, size = args[0], variables.size_of(eqn.outvars[0].aval)
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
      )
    ]

  def _fused(self, eqn, args):
    """Counts elementwise arithmetic and reductions, which are fused."""
    name = eqn.primitive.name
    reduces = name.startswith(primitives.REDUCES)
    touched = eqn.invars if reduces else eqn.outvars
    size = max((getattr(x.aval, 'size', 0) for x in touched), default=0)
    if name not in primitives.MOVES:
      self.flops += size * primitives.OPERATIONS.get(name, 1)
    for variable in args:
      large = [b for b in variable.sources if b.size > SCALAR]
      if variable.fused and len(large) > SOURCES:
        self.store(variable)
    sources = {}
    for variable in args:
      for buffer, n in variable.sources.items():
        sources[buffer] = max(n, sources.get(buffer, 0.0))
    made = []
    for var in eqn.outvars:
      one = variables.Variable(variables.size_of(var.aval), dict(sources), True)
      if reduces:
        self.store(one)
      made.append(one)
    if name == 'convert_element_type':
      made[0].letters, made[0].partial = args[0].letters, args[0].partial
      made[0].constant = args[0].constant
    elif name == 'broadcast_in_dim':
      made[0].letters = args[0].letters and primitives.letters_of(
        eqn, args[0].letters
      )
    elif name in ('add', 'add_any'):
      some = args[0].partial
      made[0].partial = some if some and some.open else None
    return made

  def _heavy(self, eqn, args):
    name = eqn.primitive.name
    for variable in args:
      self.store(variable)
    self.moved += sum(self.read(variable) for variable in args)
    made = [self.stored(var.aval) for var in eqn.outvars]
    self.moved += sum(one.size for one in made)
    self.kernels += 1
    size = max(getattr(var.aval, 'size', 0) for var in eqn.invars)
    if name in ('dot_general', 'conv_general_dilated', 'ragged_dot_general'):
      flops = primitives.product_flops(eqn)
      kind = str(eqn.invars[0].aval.dtype)
      self.matmul[kind] = self.matmul.get(kind, 0.0) + flops
      self.flops += flops
    else:
      deep = name in ('sort', 'top_k', *primitives.SCANS)
      self.flops += size * (max(1, math.ceil(math.log2(size + 1))) ** deep)
    if name == 'dot_general':
      over, _ = eqn.params['dimension_numbers']
      self._sum_over(made[0], zip(args, over, strict=True))
    return made

  def _indexed(self, eqn, args):
    """Counts reads or writes of parts of an array, in place if possible."""
    name, out = eqn.primitive.name, eqn.outvars[0].aval
    self.kernels += 1
    if name == 'gather':
      self.store(args[0])
      self.moved += sum(self.read(variable) for variable in args[1:])
      self.read(args[0])
      made = self.stored(out)
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
      made = self.stored(out)  # An argument is copied, not overwritten.
      self.moved += 2 * made.size
      return [made]
    if name != 'dynamic_update_slice':
      self.flops += getattr(eqn.invars[2].aval, 'size', 0)
    return [variables.Variable(variables.size_of(out), dict(args[0].sources))]

  def _sum_over(self, made: variables.Variable, over):
    """Records a sum over dimensions of some variables."""
    letters = [
      variable.letters[axis]
      for variable, axes in over
      for axis in (axes if variable.letters else ())
      if variable.letters[axis]
    ]
    if letters:
      made.partial = variables.PartialSum(letters, made.size)
      self._add_partial(made.partial, 1)

  def _add_up(self, one: variables.PartialSum, other: variables.PartialSum):
    """Adds two partial sums, which then need a single all-reduce."""
    if one.open and other.open and one is not other:
      self._add_partial(other, -1)
    else:
      one.open = False
    other.open = False

  def _add_partial(self, some: variables.PartialSum, n: int):
    for letter in some.letters:
      count, total = self.partial.get(letter, (0.0, 0.0))
      self.partial[letter] = count + n, total + n * some.size

  # Loops and branches.

  def _body(self, jaxpr, args, drop=()) -> Work:
    """Counts the work of one trip.

    Args:
      jaxpr: the jaxpr of the body.
      args: the arguments of the loop.
      drop: positions of the arguments that a scan slices.
    """
    frame = WorkCounter(self.trips)
    given = []
    for i, (var, variable) in enumerate(
      zip(jaxpr.jaxpr.invars, args, strict=True)
    ):
      letters = variable.letters
      if i in drop and letters is not None:
        letters = letters[1:]
      one = frame.argument(var.aval, letters)
      one.constant = None if i in drop else variable.constant
      for buffer in one.sources:  # Loops write their carry in place.
        buffer.size, buffer.outside = 0.0, False
      given.append(one)
    frame.store_all(frame.inline(jaxpr, given))
    return frame.work()

  def _repeat(self, eqn, args, done: Work, turns: float):
    for variable in args:
      self.hand_over(variable)
    self.flops += turns * done.flops
    self.moved += turns * done.bytes_moved
    self.kernels += turns * done.kernels
    for kind, flops in done.matmul.items():
      self.matmul[kind] = self.matmul.get(kind, 0.0) + turns * flops
    for letter, (count, size) in done.partial.items():
      have = self.partial.get(letter, (0.0, 0.0))
      self.partial[letter] = have[0] + turns * count, have[1] + turns * size
    self.turns = max(self.turns, done.turns)
    self.within[self.now] = done.bytes_alive
    return [self.stored(var.aval) for var in eqn.outvars]

  def _scan(self, eqn, args):
    jaxpr, n = eqn.params['jaxpr'], eqn.params['length']
    carried = eqn.params['num_consts'], eqn.params['num_carry']
    # The carry differs from trip to trip, so its initial value is forgotten.
    args = [*args]
    for i in range(carried[0], sum(carried)):
      args[i] = self._forgetful(args[i])
    drop = range(sum(carried), len(args))
    return self._repeat(eqn, args, self._body(jaxpr, args, drop), n)

  def _while(self, eqn, args):
    test, body = eqn.params['cond_jaxpr'], eqn.params['body_jaxpr']
    n, m = eqn.params['cond_nconsts'], eqn.params['body_nconsts']
    test_consts, body_consts = args[:n], args[n : n + m]
    state = args[n + m :]
    known = [
      [x.constant for x in some] for some in (test_consts, body_consts, state)
    ]
    turns, early = trip_counts.bound(test, body, *known)
    turns = self.trips if turns is None else turns
    if turns is None:
      raise ValueError(
        'The maximum trip count of a while loop is not visible: compare a '
        'counter with a number in its condition, or give `trips`.'
      )
    state = [self._forgetful(variable) for variable in state]
    done = self._body(test, test_consts + state)
    done += self._body(body, body_consts + state)
    self.turns = max(self.turns, turns * early)
    return self._repeat(eqn, test_consts + body_consts + state, done, turns)

  def _cond(self, eqn, args):
    branches = [self._body(x, args[1:]) for x in eqn.params['branches']]
    largest = max(branches, key=lambda work: (work.flops, work.bytes_moved))
    return self._repeat(eqn, args, largest, 1)

  def _forgetful(self, variable):
    self.hand_over(variable)
    return dataclasses.replace(
      variable, letters=None, partial=None, constant=None
    )
