"""Finds the maximum trip count of a `while` loop in its jaxpr.

The loop must have a counter: it ends when a carried number passes a known one,
and each trip adds a known number to it.
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
  """Returns `x` if it is a single known number, else None."""
  try:
    if np.size(x) != 1 or not np.issubdtype(np.asarray(x).dtype, np.number):
      return None
    return np.asarray(x).item()
  except TypeError:  # A key.
    return None


def bound(
  test, body, test_consts, body_consts, start
) -> tuple[int | None, bool]:
  """Returns the maximum trip count, and whether there may be fewer trips.

  The count is None if no counter is found.

  Args:
    test: closed jaxpr of the condition.
    body: closed jaxpr of the body.
    test_consts: the condition's constants, None where unknown.
    body_consts: the body's constants, likewise.
    start: initial values of the loop's carry, likewise.
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

  # The loop continues while all of these conditions hold.
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
      early = True  # Any other condition may fail early.
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
  """Returns what a trip adds to the carried number `i`."""
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
