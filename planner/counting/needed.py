"""Finds the equations of a jaxpr whose results are used."""

from collections.abc import Set


def equations(jaxpr, unread: Set[int] = frozenset()) -> list:
  """Returns the equations that a result needs, as XLA drops the others.

  The backward pass of a loop over packed rows, for example, needs what the loss
  of a row stores, but not the loss. XLA also drops what a loop collects and
  nothing reads, such as the keys and values of layers that only read a prompt.

  Args:
    jaxpr: the program.
    unread: positions of its results that are not read.

  Returns:
    Pairs of an equation and the positions of its results that are not read.
  """
  found = []
  wanted = {id(x) for i, x in enumerate(jaxpr.outvars) if i not in unread}
  for eqn in reversed(jaxpr.eqns):
    read = [id(var) in wanted for var in eqn.outvars]
    if eqn.effects or any(read):
      dead = frozenset(i for i, needed in enumerate(read) if not needed)
      found.append((eqn, dead))
      wanted.update(map(id, eqn.invars))
  return found[::-1]
