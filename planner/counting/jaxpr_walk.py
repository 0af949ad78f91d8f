"""Counts arithmetic, traffic, memory and partial sums by walking a jaxpr.

Only the fields of jaxprs are used, so this module does not import JAX.

A variable is either in memory or *fused*: it is recomputed from its sources
whenever it is read, without traffic of its own. It is stored when a kernel that
cannot be fused reads it, or when it has too many sources.
"""

import dataclasses
import math

from planner.costs.work import Work
from planner.counting import (
  allocation,
  divisions,
  kernels,
  primitives,
  trip_counts,
  variables,
)

SOURCES = 8  # A fused chain has at most so many sources.


class WorkCounter(allocation.Allocation):
  """Counts the work of a program, or of a loop's body.

  With a `divisions.Division`, bytes are those of one device of a mesh. FLOPs
  are always those of all devices.
  """

  def __init__(
    self, trips: int | None, division: divisions.Division | None = None
  ):
    super().__init__(division)
    self.trips = trips
    self.flops, self.turns = 0.0, 0.0
    self.matmul, self.partial = {}, {}

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
    if name in kernels.PRIMITIVES:
      return kernels.count(self, eqn, args)
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
      self._add_partial(scattered, 0, -variable.partial.size / 2)
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
      one = variables.Variable(size, dict(sources), True, divided=divided)
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
    made = self.stored_results(eqn, args)
    self.moved += sum(one.size for one in made)
    self.kernels += 1
    size = max(getattr(var.aval, 'size', 0) for var in eqn.invars)
    if name in ('dot_general', 'conv_general_dilated', 'ragged_dot_general'):
      flops = primitives.product_flops(eqn)
      self.add_matmul(str(eqn.invars[0].aval.dtype), flops)
      self.flops += flops
    else:
      deep = name in ('sort', 'top_k', *primitives.SCANS)
      self.flops += size * (max(1, math.ceil(math.log2(size + 1))) ** deep)
    if name == 'dot_general':
      over, _ = eqn.params['dimension_numbers']
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
    size = self.local(out, divided)
    return [variables.Variable(size, dict(args[0].sources), divided=divided)]

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
      self._add_partial(letters, 1, made.size)

  def _add_up(self, one: variables.PartialSum, other: variables.PartialSum):
    """Adds two partial sums, which then need a single all-reduce."""
    if one.open and other.open and one is not other:
      self._add_partial(other.letters, -1, -other.size)
    else:
      one.open = False
    other.open = False

  def _add_partial(self, letters, n: int, size: float):
    for letter in letters:
      count, total = self.partial.get(letter, (0.0, 0.0))
      self.partial[letter] = count + n, total + size

  # Loops and branches.

  def _body(self, jaxpr, args, drop=()) -> tuple[Work, list]:
    """Counts the work of one trip; returns how its results are divided, too.

    Args:
      jaxpr: the jaxpr of the body.
      args: the arguments of the loop.
      drop: positions of the arguments that a scan slices.
    """
    frame = WorkCounter(self.trips, self.division)
    given = []
    for i, (var, variable) in enumerate(
      zip(jaxpr.jaxpr.invars, args, strict=True)
    ):
      letters, divided = variable.letters, variable.divided
      if i in drop:
        letters = letters and letters[1:]
        divided = divided and divided[1:]
      one = frame.argument(var.aval, letters, divided)
      one.constant = None if i in drop else variable.constant
      for buffer in one.sources:  # Loops write their carry in place.
        buffer.size, buffer.outside = 0.0, False
      given.append(one)
    made = frame.inline(jaxpr, given)
    frame.store_all(made)
    return frame.work(), [variable.divided for variable in made]

  def _carrying(self, jaxpr, args, state: range, drop=()):
    """As `_body`, for arguments of which some are results of the last trip.

    Zeros that a loop begins with are divided as what is added to them.
    """
    while True:
      done, made = self._body(jaxpr, args, drop)
      changed = False
      for i, after in zip(state, made, strict=False):
        before = args[i].divided
        if before is not None and after != before and not any(before):
          args[i] = self.redivide(args[i], after)
          changed = True
      if not changed:
        return done, made

  def _repeat(self, eqn, args, done: Work, turns: float, divided):
    for variable in args:
      self.hand_over(variable)
    self.flops += turns * done.flops
    self.moved += turns * done.bytes_moved
    self.kernels += turns * done.kernels
    for kind, flops in done.matmul.items():
      self.add_matmul(kind, turns * flops)
    for letter, (count, size) in done.partial.items():
      have = self.partial.get(letter, (0.0, 0.0))
      self.partial[letter] = have[0] + turns * count, have[1] + turns * size
    self.turns = max(self.turns, done.turns)
    self.within[self.now] = done.bytes_alive
    return [
      self.stored(var.aval, some)
      for var, some in zip(eqn.outvars, divided, strict=True)
    ]

  def _scan(self, eqn, args):
    jaxpr, n = eqn.params['jaxpr'], eqn.params['length']
    carried = eqn.params['num_consts'], eqn.params['num_carry']
    # The carry differs from trip to trip, so its initial value is forgotten.
    args = [*args]
    for i in range(carried[0], sum(carried)):
      args[i] = self._forgetful(args[i])
    drop, state = (
      range(sum(carried), len(args)),
      range(carried[0], sum(carried)),
    )
    done, made = self._carrying(jaxpr, args, state, drop)
    divided = [
      some if i < carried[1] or some is None else ((), *some)
      for i, some in enumerate(made)
    ]
    return self._repeat(eqn, args, done, n, divided)

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
    args = body_consts + state
    done, made = self._carrying(body, args, range(m, len(args)))
    done += self._body(test, test_consts + state)[0]
    self.turns = max(self.turns, turns * early)
    return self._repeat(eqn, test_consts + args, done, turns, made)

  def _shard_map(self, eqn, args):
    """Counts what a device computes of its own part, for all devices."""
    of_part = [x.laid_out(x.divided and ((),) * len(x.divided)) for x in args]
    sizes, axes = eqn.params['mesh'].shape, eqn.params['newly_manual_axes']
    others = math.prod(sizes[axis] for axis in axes) - 1
    flops, matmul = self.flops, dict(self.matmul)
    made = self.inline(eqn.params['jaxpr'], of_part)
    self.flops += others * (self.flops - flops)
    for kind, total in [*self.matmul.items()]:
      self.add_matmul(kind, others * (total - matmul.get(kind, 0.0)))
    return [
      x.laid_out(x.divided and divisions.of_spec(spec, len(x.divided)))
      for x, spec in zip(made, eqn.params['out_specs'], strict=True)
    ]

  def _cond(self, eqn, args):
    branches = [self._body(x, args[1:]) for x in eqn.params['branches']]
    largest, made = max(
      branches, key=lambda pair: (pair[0].flops, pair[0].bytes_moved)
    )
    return self._repeat(eqn, args, largest, 1, made)

  def _forgetful(self, variable):
    self.hand_over(variable)
    return dataclasses.replace(
      variable, letters=None, partial=None, constant=None
    )
