"""Counts loops, branches and maps over the shards of a mesh."""

import dataclasses
import math

from planner.costs.work import Work
from planner.counting import allocation, divisions, trip_counts, variables

# The scope in which decoding runs a loop for each part of its tokens.
PARTS = 'decoded_parts'


class LoopCounter(allocation.Allocation):
  """Counts them by walks of their bodies, which a subclass does.

  Attributes:
    trips: trip count of a `while` loop whose maximum is not visible.
    flops: arithmetic operations so far.
    turns: as `work.Work.turns`, so far.
    matmul: operations of products so far, by type of the operands.
    partial: partial sums so far, as `work.Work.partial`.
    without: name of a scope whose equations count as nothing; None for none.
    unread: positions of results of the equation under way that nothing reads.
    readers: in its program, how often equations read each variable, by `id`.
  """

  def __init__(
    self, trips: int | None, division: divisions.Division | None = None
  ):
    super().__init__(division)
    self.trips = trips
    self.flops, self.turns = 0.0, 0.0
    self.matmul, self.partial = {}, {}
    self.without = None
    self.unread, self.readers = frozenset(), {}

  def _body(
    self, jaxpr, args, drop=(), state=(), unread=frozenset()
  ) -> tuple[Work, list]:
    """Counts the work of one trip; returns its results, too.

    Args:
      jaxpr: the jaxpr of the body.
      args: the arguments of the loop.
      drop: positions of the arguments that a scan slices.
      state: positions of those that the first results replace.
      unread: positions of results that nothing reads.
    """
    frame = type(self)(self.trips, self.division)
    frame.parameters, frame.whole = self.parameters, self.whole
    frame.platform, frame.without = self.platform, self.without
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
        buffer.origins |= variable.origins
      given.append(one)
    made = frame.inline(jaxpr, given, unread)
    in_place = [
      variable
      for i, variable in zip(state, made, strict=False)
      if variable.fused and given[i].sources.keys() & variable.sources.keys()
    ]
    frame.store_all(made)
    frame.copy_sums(made)
    for variable in in_place:  # Such as a sum so far, to which a trip adds.
      for buffer in variable.sources:
        buffer.size = 0.0
    return frame.work(), made

  def _carrying(self, jaxpr, args, state: range, drop=(), unread=frozenset()):
    """As `_body`, for arguments of which some are results of the last trip.

    Zeros that a loop begins with are divided as what is added to them.
    """
    while True:
      done, made = self._body(jaxpr, args, drop, state, unread)
      changed = False
      for i, result in zip(state, made, strict=False):
        before, after = args[i].divided, result.divided
        if before is not None and after != before and not any(before):
          args[i] = self.redivide(args[i], after)
          changed = True
      if not changed:
        return done, made

  def _repeat(
    self,
    eqn,
    args,
    done: Work,
    turns: float,
    made,
    state=(),
    unread=frozenset(),
    drop=(),
  ):
    for variable in args:
      self.hand_over(variable)
    for i, times in done.reads.items():
      # Each trip gathers again, unless the array is whole before the loop.
      there = self._used if self.whole else set()
      for given in self.reads.keys() & args[i].origins - there:
        self.reads[given] += times * (1.0 if i in drop else turns)
    for i in state:  # A loop's results take over the memory of zeros.
      for buffer in args[i].sources:
        if buffer.born == self.now and not buffer.outside:
          buffer.size = 0.0
    self.flops += turns * done.flops
    self.moved += turns * done.bytes_moved
    self.kernels += turns * done.kernels
    for kind, flops in done.matmul.items():
      self.add_matmul(kind, turns * flops)
    for letter, some in done.partial.items():
      have = self.partial.get(letter, (0.0, 0.0, 0.0))
      self.partial[letter] = tuple(
        a + turns * b for a, b in zip(have, some, strict=True)
      )
    self.turns = max(self.turns, done.turns)
    self.within[self.now] = (
      done.bytes_alive,
      done.bytes_gathered,
      done.bytes_sharded,
    )
    return [
      variables.NOTHING if i in unread else self.stored(var.aval, some.divided)
      for i, (var, some) in enumerate(zip(eqn.outvars, made, strict=True))
    ]

  def _scan(self, eqn, args):
    jaxpr, n = eqn.params['jaxpr'], eqn.params['length']
    carried = _constants_and_carry(eqn.params)
    # The carry differs from trip to trip, so its initial value is forgotten.
    args = [*args]
    for i in range(carried[0], sum(carried)):
      args[i] = self._forgetful(args[i])
    drop, state = (
      range(sum(carried), len(args)),
      range(carried[0], sum(carried)),
    )
    # A trip reads what the last one carries.
    unread = frozenset(i for i in self.unread if i >= carried[1])
    done, made = self._carrying(jaxpr, args, state, drop, unread)
    stacked = made[carried[1] :]
    made = made[: carried[1]] + [
      dataclasses.replace(x, divided=x.divided and ((), *x.divided))
      for x in stacked
    ]
    made = self._repeat(eqn, args, done, n, made, state, unread, drop)
    # Parameters that a forward pass stores for each trip keep their letters.
    for i in range(carried[1], len(made)):
      letters = stacked[i - carried[1]].letters
      if i not in unread:
        made[i].letters = letters and ('', *letters)
        for buffer in made[i].sources:
          buffer.origins |= stacked[i - carried[1]].origins
    return made

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
    reads = {n + i: times for i, times in done.reads.items()}
    done += self._body(test, test_consts + state)[0]
    done = dataclasses.replace(done, reads=reads)
    before = self.turns if PARTS in str(eqn.source_info.name_stack) else 0.0
    self.turns = max(self.turns, before + turns * early)
    carried = range(len(test_consts) + m, len(test_consts + args))
    return self._repeat(eqn, test_consts + args, done, turns, made, carried)

  def _shard_map(self, eqn, args):
    """Counts what a device computes of its own part, for all devices."""
    of_part = [x.laid_out(x.divided and ((),) * len(x.divided)) for x in args]
    sizes, axes = eqn.params['mesh'].shape, eqn.params['newly_manual_axes']
    if self.division:  # The program may be another mesh's, of the same axes.
      sizes = self.division.sizes
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
    # Any of the branches may run, and memory must suffice for it.
    memory = {
      name: max(getattr(work, name) for work, _ in branches)
      for name in ('bytes_alive', 'bytes_gathered', 'bytes_sharded')
    }
    reads = {
      i + 1: max(work.reads.get(i, 0.0) for work, _ in branches)
      for i in range(len(args) - 1)
    }
    largest = dataclasses.replace(largest, **memory, reads=reads)
    return self._repeat(eqn, args, largest, 1, made)

  def _forgetful(self, variable):
    self.hand_over(variable)
    return dataclasses.replace(
      variable, letters=None, partial=None, constant=None
    )


def _constants_and_carry(params) -> tuple[int, int]:
  """Numbers of the arguments of a scan that are constant, and carried."""
  if 'num_consts' in params:
    return params['num_consts'], params['num_carry']
  # From JAX 0.11 on, a tree says which arguments are which.
  constants, carry, _ = params['ft_in'].unpack()
  return len([*constants]), len([*carry])
