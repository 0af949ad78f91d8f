"""How often a `while` loop turns at most, as its jaxpr shows.

A loop shows it by a counter: it ends when a carried number passes a known one,
and each turn adds a known number to it.
"""

import math
import operator

import numpy as np

COMPARISONS = {
  'lt': operator.lt,
  'le': operator.le,
  'gt': operator.gt,
  'ge': operator.ge,
}
SWAPPED = {'lt': 'gt', 'le': 'ge', 'gt': 'lt', 'ge': 'le'}


def is_literal(atom) -> bool:
  return hasattr(atom, 'val')


def number(x) -> float | None:
  """`x`, if it is one known number."""
  try:
    if np.size(x) != 1 or not np.issubdtype(np.asarray(x).dtype, np.number):
      return None
    return np.asarray(x).item()
  except TypeError:  # A key.
    return None


def bound(
  test, body, test_consts, body_consts, start
) -> tuple[int | None, bool]:
  """The most turns, and whether there may be fewer.

  The turns are None where no counter is seen.

  Args:
    test: closed jaxpr of the condition.
    body: closed jaxpr of a turn.
    test_consts: what is known of the condition's constants, as numbers or None.
    body_consts: of the body's.
    start: of what the loop carries as it begins.
  """
  inner, known, carried = test.jaxpr, {}, {}
  n = len(test_consts)
  known |= zip(inner.invars[:n], test_consts, strict=True)
  known |= zip(inner.constvars, map(number, test.consts), strict=True)
  carried |= {var: i for i, var in enumerate(inner.invars[n:])}
  maker = {var: eqn for eqn in inner.eqns for var in eqn.outvars}

  def value(atom):
    if is_literal(atom):
      return number(atom.val)
    eqn = maker.get(atom)
    if eqn is not None and eqn.primitive.name == 'convert_element_type':
      return value(eqn.invars[0])
    return known.get(atom)

  # Each of these must hold for the loop to go on.
  wanted, found, early = [inner.outvars[0]], [], False
  while wanted:
    atom = wanted.pop()
    eqn = None if is_literal(atom) else maker.get(atom)
    name = eqn.primitive.name if eqn else None
    turns = None
    if name in ('and', 'convert_element_type'):
      wanted += eqn.invars
      continue
    if name in COMPARISONS:
      left, right = eqn.invars
      if value(left) is not None:
        left, right, name = right, left, SWAPPED[name]
      i = None if is_literal(left) else carried.get(left)
      limit = value(right)
      if i is not None and limit is not None and start[i] is not None:
        step = _step(body, i, body_consts)
        turns = _turns(name, start[i], limit, step) if step else None
    if turns is None:
      early = True  # A condition that is not counted may fail at any turn.
    else:
      found.append(turns)
  return min(found, default=None), early


def _turns(name, start, limit, step) -> int | None:
  if not COMPARISONS[name](start, limit):
    return 0
  if (limit - start) * step < 0:
    return None
  away = (limit - start) / step
  return math.ceil(away) if name in ('lt', 'gt') else math.floor(away) + 1


def _step(body, i, consts) -> float | None:
  """What a turn adds to the carried number `i`."""
  inner = body.jaxpr
  known = dict(zip(inner.invars, consts, strict=False))
  known |= zip(inner.constvars, map(number, body.consts), strict=True)
  var, out = inner.invars[len(consts) + i], inner.outvars[i]
  for eqn in inner.eqns:
    if out in eqn.outvars and eqn.primitive.name in ('add', 'sub'):
      left, right = eqn.invars
      if right is var and eqn.primitive.name == 'add':
        left, right = right, left
      if left is not var:
        return None
      if is_literal(right):
        step = number(right.val)
      else:
        step = known.get(right)
      if step is not None and eqn.primitive.name == 'sub':
        step = -step
      return step
  return None
