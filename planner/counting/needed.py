"""Finds the equations of a jaxpr whose results are used."""


def equations(jaxpr) -> list:
  """Returns the equations that a result needs, as XLA drops the others.

  The backward pass of a loop over packed rows, for example, needs what the loss
  of a row stores, but not the loss.
  """
  found, wanted = [], {id(x) for x in jaxpr.outvars}
  for eqn in reversed(jaxpr.eqns):
    if eqn.effects or any(id(var) in wanted for var in eqn.outvars):
      found.append(eqn)
      wanted.update(map(id, eqn.invars))
  return found[::-1]
