"""Finds parts of a program that compute each element of their arrays alone.

An optimizer's update is such a part for each parameter: an element of the new
parameter and of its new moments follows from the same element of the old ones,
of the gradient, and from scalars. So it can be computed for some elements at a
time. Parts that read whole arrays, such as a factored second moment, cannot.
"""

from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import jax
from jax.extend import core

# Primitives of which each element of the result follows from the same element
# of the operands. Their parameters do not depend on shapes.
PRIMITIVES = frozenset(
  'abs acos add add_any and asin atan atan2 cbrt ceil clamp '
  'convert_element_type copy copy_p cos cosh div eq erf exp exp2 expm1 '
  'floor ge gt integer_pow '
  'is_finite le log log1p logistic lt max min mul ne neg not or pow '
  'reduce_precision rem round rsqrt select_n sign sin sinh sqrt square '
  'stop_gradient sub tan tanh xor'.split()
)
BROADCAST = 'broadcast_in_dim'
_CALLS = ('jaxpr', 'call_jaxpr', 'fun_jaxpr')
# Their jaxprs are no functions of the equation's operands: those of a kernel
# take references.
_CONTROL = frozenset(('scan', 'while', 'cond', 'shard_map', 'pallas_call'))


class Part(NamedTuple):
  """Results that follow from some of a program's arguments.

  Attributes:
    reads: positions of those arguments.
    writes: positions of the results that depend on them, and of no others.
    equations: those that make these results, in order; variables without a
      dimension that do not depend on the arguments are made before.
    elementwise: whether each element of the results follows from the same
      element of arrays of this shape, and from scalars.
  """

  reads: tuple[int, ...]
  writes: tuple[int, ...]
  equations: tuple[core.JaxprEqn, ...]
  elementwise: bool


def inlined(fn, *shapes) -> core.ClosedJaxpr:
  """Traces a function; calls within it are replaced by their equations.

  Args:
    fn: takes and returns trees of arrays.
    *shapes: of its arguments.
  """
  closed = jax.make_jaxpr(fn)(*shapes)
  leaves = jax.tree.leaves(shapes)
  return jax.make_jaxpr(lambda *args: _inline(closed, args))(*leaves)


def _inline(closed: core.ClosedJaxpr, args) -> list:
  """Evaluates a jaxpr, and the jaxprs of its calls equation by equation."""
  jaxpr = closed.jaxpr
  env = dict(zip(jaxpr.invars, args, strict=True))
  env |= zip(jaxpr.constvars, closed.consts, strict=True)
  for eqn in jaxpr.eqns:
    operands = [value(env, x) for x in eqn.invars]
    name = eqn.primitive.name
    key = next((key for key in _CALLS if key in eqn.params), None)
    if key is None or name in _CONTROL or name.startswith('reduce'):
      made = bind(eqn, operands)
    else:
      inner = eqn.params[key]
      if not isinstance(inner, core.ClosedJaxpr):
        inner = core.ClosedJaxpr(inner, ())
      made = _inline(inner, operands)
    env |= zip(eqn.outvars, made, strict=True)
  return [value(env, x) for x in jaxpr.outvars]


def value(env, atom) -> Any:
  """Returns the value of a variable, or of a literal."""
  return atom.val if isinstance(atom, core.Literal) else env[atom]


def bind(eqn: core.JaxprEqn, operands) -> list:
  """Evaluates one equation; returns its results."""
  params = eqn.primitive.get_bind_params(eqn.params)
  made = eqn.primitive.bind(*operands, **params)
  return made if eqn.primitive.multiple_results else [made]


def parts(jaxpr: core.Jaxpr, positions: Collection[int]) -> list[Part]:
  """Divides the results that depend on some arguments into independent parts.

  Args:
    jaxpr: an inlined program.
    positions: of those arguments.
  """
  depends = {jaxpr.invars[i]: frozenset((i,)) for i in positions}
  groups = {i: frozenset((i,)) for i in positions}
  makers = {}
  for eqn in jaxpr.eqns:
    found = frozenset().union(
      *(depends.get(x, ()) for x in eqn.invars if isinstance(x, core.Var))
    )
    for i in found:  # An equation joins the parts of all that it reads.
      joined = groups[i].union(*(groups[j] for j in found))
      groups |= dict.fromkeys(joined, joined)
    for var in eqn.outvars:
      depends[var], makers[var] = found, eqn
  results = {
    i: depends.get(x, frozenset())
    for i, x in enumerate(jaxpr.outvars)
    if isinstance(x, core.Var)
  }
  out = []
  for group in dict.fromkeys(groups[i] for i in sorted(positions)):
    writes = tuple(i for i, found in results.items() if found & group)
    needed = [*_needed(jaxpr, writes, depends, makers)]
    whole = {id(eqn) for eqn in needed}
    ordered = tuple(eqn for eqn in jaxpr.eqns if id(eqn) in whole)
    reads = tuple(sorted(group))
    alone = _is_elementwise(jaxpr, reads, writes, ordered)
    out.append(Part(reads, writes, ordered, alone))
  return out


def _needed(jaxpr, writes, depends, makers) -> Iterator[core.JaxprEqn]:
  """Yields the equations that make some results.

  Arrays are made again from the program's arguments, whether another part needs
  them or not: arithmetic on a few elements costs less than memory for all.
  """
  seen, wanted = set(), [jaxpr.outvars[i] for i in writes]
  while wanted:
    var = wanted.pop()
    if not isinstance(var, core.Var) or var not in makers or var in seen:
      continue
    if not var.aval.shape and not depends[var]:
      continue  # A scalar, such as the norm of the gradient, is made once.
    seen.update(makers[var].outvars)
    yield makers[var]
    wanted += makers[var].invars


def _is_elementwise(jaxpr, reads, writes, equations) -> bool:
  shapes = {jaxpr.invars[i].aval.shape for i in reads}
  shapes |= {jaxpr.outvars[i].aval.shape for i in writes}
  if len(shapes) > 1 or shapes == {()} or not writes:
    return False
  (shape,) = shapes
  for eqn in equations:
    name, (out, *others) = eqn.primitive.name, eqn.outvars
    ins = [x.aval.shape for x in eqn.invars]
    if others or out.aval.shape != shape or not {*ins} <= {(), shape}:
      return False
    if name not in PRIMITIVES and (name != BROADCAST or ins != [()]):
      return False
  return True
