"""Calls of functions some of whose arguments stay in host memory.

Such an argument is replaced by a result, such as the moments of an optimizer in
an update. Where the function computes each element alone, a slice of the
arguments is moved to the device, updated, and moved back, one slice after
another: the device never holds more than a few slices of them. Other arguments
are moved as a whole.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from sharding import elementwise, slices

_HOST, _DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def streamed(
  fn: Callable,
  shapes: Sequence[jax.ShapeDtypeStruct],
  layouts: Sequence[jax.sharding.Sharding],
  pairs: Mapping[int, int],
  donated: Container[int] = (),
  platform: str | None = None,
) -> Callable:
  """Returns `fn` with some arguments and results in host memory.

  Args:
    fn: takes and returns arrays.
    shapes: of its arguments.
    layouts: likewise.
    pairs: for the position of each argument in host memory, that of the result
      which replaces it there.
    donated: positions of arguments whose memory results may take over.
    platform: as in `slices.slice_rows`.
  """

  def call(*leaves):
    closed = elementwise.inlined(fn, *shapes)
    program = _Program(closed.jaxpr, pairs, donated, platform)
    parts = elementwise.parts(closed.jaxpr, [*pairs])
    # As traced, all arguments are on the device.
    leaves = [
      jax.device_put(x, _HOST) if i in pairs else x
      for i, x in enumerate(leaves)
    ]
    env = dict(zip(closed.jaxpr.invars, leaves, strict=True))
    env |= zip(closed.jaxpr.constvars, closed.consts, strict=True)
    for eqn in _others(closed.jaxpr, pairs):
      env |= _evaluated(env, eqn)
    made = {}
    for part in parts:
      run = _in_slices if part.elementwise else _as_a_whole
      made |= run(program, part, env, layouts[part.reads[0]])
    for i, x in enumerate(closed.jaxpr.outvars):
      if i not in made:
        made[i] = program.stored(i, elementwise.value(env, x))
    return [made[i] for i in range(len(made))]

  return call


class _Program(NamedTuple):
  """The equations of a function, and where its arguments are.

  Attributes:
    jaxpr: without calls.
    pairs: as in `streamed`.
    donated: likewise.
    platform: likewise.
  """

  jaxpr: elementwise.core.Jaxpr
  pairs: Mapping[int, int]
  donated: Container[int]
  platform: str | None

  def stored(self, i: int, x):
    """`x`, the result at position `i`, in the memory that it belongs to."""
    return jax.device_put(x, _HOST) if i in self.pairs.values() else x

  def overwritten(self, part: elementwise.Part) -> list | None:
    """Variables of arguments whose memory the results of a part take over.

    Where no argument of a result's type may be overwritten, one is copied; None
    if there is none.
    """
    invars = self.jaxpr.invars
    found = {self.pairs[i]: invars[i] for i in part.reads}
    read = {x for eqn in part.equations for x in eqn.invars if _is_variable(x)}
    free = [
      j for j, x in enumerate(invars) if x in read and j not in self.pairs
    ]
    free.sort(key=lambda j: j not in self.donated)
    for i in part.writes:
      if i in found:
        continue
      kind = _kind(self.jaxpr.outvars[i])
      same = next((j for j in free if _kind(invars[j]) == kind), None)
      if same is None:
        return None
      free.remove(same)
      found[i] = invars[same]
    return [found[i] for i in part.writes]


def _kind(variable):
  return variable.aval.shape, variable.aval.dtype


def _is_variable(x) -> bool:
  return isinstance(x, elementwise.core.Var)


def _others(jaxpr, pairs):
  """Yields the equations that do not depend on what is in host memory."""
  away = {jaxpr.invars[i] for i in pairs}
  for eqn in jaxpr.eqns:
    if away.intersection(filter(_is_variable, eqn.invars)):
      away.update(eqn.outvars)
    else:
      yield eqn


def _evaluated(env, eqn) -> dict:
  operands = [elementwise.value(env, x) for x in eqn.invars]
  return dict(zip(eqn.outvars, elementwise.bind(eqn, operands), strict=True))


def _as_a_whole(program, part, env, layout=None) -> dict:
  """Moves the arguments of a part, computes it, and moves its results back."""
  del layout
  env, jaxpr = dict(env), program.jaxpr
  for i in part.reads:
    env[jaxpr.invars[i]] = jax.device_put(env[jaxpr.invars[i]], _DEVICE)
  for eqn in part.equations:
    env |= _evaluated(env, eqn)
  return {
    i: program.stored(i, elementwise.value(env, jaxpr.outvars[i]))
    for i in part.writes
  }


def _in_slices(program, part, env, layout) -> dict:
  """Computes an elementwise part slice by slice, on each device for itself."""
  over = program.overwritten(part)
  if over is None:
    return _as_a_whole(program, part, env)
  outputs = [program.jaxpr.outvars[i] for i in part.writes]
  made = {var for eqn in part.equations for var in eqn.outvars}
  read = [x for eqn in part.equations for x in eqn.invars]
  needed = dict.fromkeys(
    x for x in (*read, *outputs, *over) if _is_variable(x) and x not in made
  )
  arrays = [x for x in needed if x.aval.shape]
  scalars = [x for x in needed if not x.aval.shape]
  away = {program.jaxpr.invars[i] for i in part.reads}

  def local(arrays_, scalars_):
    fixed = dict(zip(scalars, scalars_, strict=True))
    given = dict(zip(arrays, arrays_, strict=True))
    return _loop(
      part,
      fixed,
      given,
      [*zip(outputs, over, strict=True)],
      away,
      program.platform,
    )

  if isinstance(layout, NamedSharding):
    spec, whole = layout.spec, PartitionSpec()
    local = jax.shard_map(
      local,
      mesh=layout.mesh,
      in_specs=([spec] * len(arrays), [whole] * len(scalars)),
      out_specs=[spec] * len(outputs),
      check_vma=False,  # Equations are those of a program without devices.
    )
  results = local([env[x] for x in arrays], [env[x] for x in scalars])
  return dict(zip(part.writes, results, strict=True))


def _loop(part, fixed, given, outputs, away, platform) -> list:
  """Computes slices of an elementwise part, one after another.

  Args:
    part: the part.
    fixed: values of its scalars.
    given: arrays of one shape, by variable.
    outputs: pairs of a result's variable, and that of the array which it
      overwrites.
    away: variables of arrays in host memory.
    platform: as in `slices.slice_rows`.
  """
  shape = next(iter(given.values())).shape
  itemsize = max(x.dtype.itemsize for x in given.values())
  rows = slices.slice_rows(shape, itemsize, platform)
  some = rows, *shape[1:]

  def update(i, arrays):
    now = given | dict(zip((v for _, v in outputs), arrays, strict=True))
    env = dict(fixed)
    for var, x in now.items():
      x = lax.dynamic_slice_in_dim(x, i * rows, rows)
      env[var] = jax.device_put(x, _DEVICE) if var in away else x
    for eqn in part.equations:
      if eqn.primitive.name == elementwise.BROADCAST:
        x = elementwise.value(env, eqn.invars[0])
        env[eqn.outvars[0]] = jnp.broadcast_to(x, some)
      else:
        env |= _evaluated(env, eqn)
    out = []
    for (var, old), x in zip(outputs, arrays, strict=True):
      new = env[var]
      new = jax.device_put(new, _HOST) if old in away else new
      out.append(lax.dynamic_update_slice_in_dim(x, new, i * rows, 0))
    return out

  arrays = [given[old] for _, old in outputs]
  return lax.fori_loop(0, shape[0] // rows, update, arrays)
