"""Arrays that are computed, or read from files, only when they are needed.

A process that holds a part of a state computes that part alone: the function
that makes the whole state is called once, and what it returns is computed array
by array. Every operation is then executed as it would have been at once, so
the numbers are the same to the bit, which a compiled program does not promise.

JAX has no public way to say how operations are executed, so this module uses
its internal `Trace`, as its transformations do.
"""

from collections.abc import Callable
from typing import Any
import weakref

import jax
from jax._src import core
import jax.numpy as jnp
import numpy as np

from sharding import multihost, offload


class _Call:
  """An operation whose operands are known.

  Attributes:
    made: its results, deferred. They are held by those who need them, and not
      by this object, so that each frees its array by itself.
  """

  def __init__(self, primitive, args, params):
    self.primitive, self.params = primitive, params
    self.args, self.made = args, ()

  def defer(self, trace, avals) -> list['Deferred']:
    """Returns the results, not computed yet."""
    made = [Deferred(trace, aval, self, i) for i, aval in enumerate(avals)]
    self.made = [*map(weakref.ref, made)]
    return made

  def run(self, done: dict | None):
    """Executes the operation.

    Args:
      done: results by call, as lists, which are added to; None to keep each
        result with its deferred array, and to execute this once.
    """
    args = [_compute(x, done) for x in self.args]
    results = self.primitive.bind(*args, **self.params)
    results = results if self.primitive.multiple_results else [results]
    if done is not None:
      done[self] = results
      return
    for made, result in zip(self.made, results, strict=True):
      if (x := made()) is not None:
        x.result = result
    self.args = ()  # Lets the operands be freed.


class Deferred(core.Tracer):
  """An array that is not computed yet; any other value is not deferred."""

  __slots__ = ['call', 'index', 'result']

  def __init__(self, trace, aval, call: _Call, index: int):
    super().__init__(trace, aval)
    self.call, self.index, self.result = call, index, None


class _DeferringTrace(core.Trace):
  """Records operations instead of executing them."""

  def stage_value(self, val):
    if isinstance(val, jax.Array):
      return val
    # Of this operation, JAX 0.11.2 cannot tell the result without executing it.
    call = _Call(core.stage_p, [val], {})
    return call.defer(self, [core.typeof(val)])[0]

  def process_primitive(self, primitive, tracers, params, /):
    avals = [core.typeof(x) for x in tracers]
    made, _ = primitive.abstract_eval(*avals, **params)
    call = _Call(primitive, tracers, params)
    if not primitive.multiple_results:
      return call.defer(self, [made])[0]
    return call.defer(self, made)

  def process_call(self, call_primitive, f, tracers, params, /):
    del call_primitive, params
    with core.set_current_trace(self):
      return f.call_wrapped(*tracers)

  def process_custom_jvp_call(self, primitive, fun, jvp, tracers, /, **_):
    del primitive, jvp
    with core.set_current_trace(self):
      return fun.call_wrapped(*tracers)

  def process_custom_vjp_call(self, primitive, fun, fwd, bwd, tracers, /, **_):
    del primitive, fwd, bwd
    with core.set_current_trace(self):
      return fun.call_wrapped(*tracers)


def defer(fn: Callable[..., Any], *args) -> Any:
  """Calls a function of JAX, and computes nothing.

  Args:
    fn: takes and returns trees of arrays; it can be traced.
    *args: its arguments.

  Returns:
    What it returns, with arrays that `put` computes.
  """
  with core.set_current_trace(_DeferringTrace()):
    return fn(*args)


def is_deferring() -> bool:
  """Whether this is called by a function that `defer` calls."""
  return isinstance(core.trace_ctx.trace, _DeferringTrace)


def only_shapes(x: Any) -> bool:
  """Whether a value stands for a shape, and is never computed."""
  return isinstance(x, core.Tracer) and not isinstance(x, Deferred)


def put(
  x: Any, layout: jax.sharding.Sharding, *, keep: bool = True
) -> jax.Array:
  """Computes an array, if it is deferred, and copies it to a layout.

  The result shares memory with no other array, nor do its copies on several
  devices, so a call may overwrite it. An array that is read from files and not
  changed is read part by part, each where it belongs.

  Args:
    x: deferred or not.
    layout: the sharding of the result.
    keep: whether a deferred array, and those that it is computed from, are kept
      for those that need them later, or computed again for each.
  """
  there = offload.on_device(layout)
  if isinstance(x, Deferred) and x.call.primitive is _read:
    x = _made(x.call.params['read'], x.shape, there)
  else:
    x = multihost.put(_compute(x, None if keep else {}), there)
  # JAX may let devices of one host share the memory of what they were given.
  x = _copied(x)
  if there is not layout:
    x = jax.device_put(x, layout)
  return jax.block_until_ready(x)


def _copied(x: jax.Array) -> jax.Array:
  """A copy of an array, with its layout."""
  if x.is_fully_addressable:
    # A program would be compiled for each shape and layout of a state.
    return jax.device_put(x, x.sharding, may_alias=False)
  return _copied_by_all(x)


_copied_by_all = jax.jit(jnp.copy)  # A program of all processes.


def _compute(x: Any, done: dict | None) -> Any:
  """The value of an array; `done` as `_Call.run`."""
  if not isinstance(x, Deferred):
    return x
  if x.result is not None:
    return x.result
  if done is None:
    x.call.run(done)
    return x.result
  if x.call not in done:
    x.call.run(done)
  return done[x.call][x.index]


def read(
  shape: tuple[int, ...],
  dtype: Any,
  part: Callable[[tuple[slice, ...]], np.ndarray],
  layout: jax.sharding.Sharding | None = None,
) -> jax.Array:
  """An array that is read from files, unless only its shape is needed.

  Args:
    shape: of the array.
    dtype: its type.
    part: `index -> array`: reads a part of it.
    layout: its sharding, where it is not deferred; None for the first device.
  """
  return _read.bind(
    shape=shape, dtype=np.dtype(dtype), read=part, layout=layout
  )


def astype(x: jax.Array, dtype: Any) -> jax.Array:
  """An array in another type; one to be read from files is read in it."""
  dtype = np.dtype(dtype)
  if x.dtype == dtype:
    return x
  if not isinstance(x, Deferred) or x.call.primitive is not _read:
    return x.astype(dtype)
  given = x.call.params
  part = lambda index: given['read'](index).astype(dtype)
  return read(x.shape, dtype, part, given['layout'])


def _made(part, shape, layout):
  if layout is None:
    return jax.device_put(part((slice(None),) * len(shape)))
  return jax.make_array_from_callback(shape, layout, part)


_read = core.Primitive('read')
_read.def_impl(lambda *, shape, dtype, read, layout: _made(read, shape, layout))
_read.def_abstract_eval(
  lambda *, shape, dtype, read, layout: core.ShapedArray(shape, dtype)
)
