"""Functions of rows that run on each device's own rows, with whole parameters.

XLA places collectives by itself, one at a time. In a loop over chunks of rows
it gathers a sharded parameter in each turn, and adds up its gradient in each.
Here a parameter is gathered once before the function, and its gradient is
added up once after it.
"""

from collections.abc import Callable
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from sharding import mesh as mesh_lib
from sharding import rules as rules_lib


def map_rows(
  fn: Callable,
  params: Any,
  *rows: Any,
  dtype: Any,
  rules: rules_lib.Rules = rules_lib.DEFAULT,
) -> Any:
  """Returns `fn(params, *rows)`, computed by each device for its own rows.

  Axes of the ambient mesh that do not shard rows, such as `tensor`, are left to
  XLA. Without a mesh, or if rows do not divide evenly, this only calls `fn`.
  The planner knows by the name of the scope that parameters are whole there.

  Args:
    fn: returns arrays with a leading dimension of rows; a row of its result
      depends on the same row of its arguments.
    params: a tree of parameters, whose names spell their dimensions.
    *rows: trees of arrays with a leading dimension of rows.
    dtype: of the parameters of rank two and more on their way to other devices.
      `fn` must round them to it. Gradients return in their own dtype.
    rules: mesh axes of each letter.
  """
  with jax.named_scope('map_rows'):
    return _map_rows(fn, params, rows, dtype, rules)


def _map_rows(fn, params, rows, dtype, rules):
  n = jax.tree.leaves(rows)[0].shape[0]
  if rules_lib.devices_of('B', n, rules) == 1:
    return fn(params, *rows)
  mesh = jax.sharding.get_abstract_mesh()
  axes = rules_lib.mesh_axes(mesh, 'B', rules)

  def specs(is_kept):
    some = {
      letter: tuple(filter(is_kept, rules_lib.mesh_axes(mesh, letter, rules)))
      for letter in rules
    }

    def spec(path, leaf):
      letters = rules_lib.dimensions(path, leaf.shape) or ('',) * leaf.ndim
      return rules_lib.partition_spec(mesh, letters, leaf.shape, some)

    return jax.tree_util.tree_map_with_path(spec, params)

  of_rows = specs(lambda axis: axis in axes)
  others = specs(lambda axis: axis not in axes)

  def local(params, *rows):
    gather = functools.partial(_gather_leaf, axes, dtype)
    return fn(jax.tree.map(gather, params, of_rows, others), *rows)

  by_row = PartitionSpec(axes)
  return jax.shard_map(
    local,
    in_specs=(of_rows, *(by_row for _ in rows)),
    out_specs=by_row,
    axis_names={*axes},
  )(params, *rows)


def map_heads(
  fn: Callable,
  q_BTHW,
  k_BCKW,
  v_BCKW,
  x_BC,
  rules: rules_lib.Rules = rules_lib.DEFAULT,
):
  """Returns `fn` of these, [B, T, H, W], by each device for its rows and heads.

  XLA cannot divide the work of a kernel. Without a mesh, this only calls `fn`.

  Args:
    fn: attention, by rows and heads.
    q_BTHW: queries, which devices can share evenly.
    k_BCKW: keys, likewise.
    v_BCKW: values.
    x_BC: what `fn` reads of each key; None for nothing.
    rules: mesh axes of each letter.
  """
  mesh = jax.sharding.get_abstract_mesh()
  axes = {*mesh.axis_names} - {*mesh.manual_axes}
  if not axes:
    return fn(q_BTHW, k_BCKW, v_BCKW, x_BC)
  rows, heads = (rules_lib.ambient_axes(x, rules) or None for x in 'BH')
  # By which the parts of devices have their sizes.
  mesh_lib.devices_along(mesh, (*(rows or ()), *(heads or ())))
  by_head = PartitionSpec(rows, None, heads)
  return jax.shard_map(
    fn,
    in_specs=(by_head, by_head, by_head, PartitionSpec(rows)),
    out_specs=by_head,
    axis_names=axes,
    check_vma=False,  # Kernels do not say how their results vary.
  )(q_BTHW, k_BCKW, v_BCKW, x_BC)


def map_key_heads(
  fn: Callable,
  of_heads: tuple,
  other: Any,
  rules: rules_lib.Rules = rules_lib.DEFAULT,
):
  """Returns `fn(*of_heads, other)`, by each device for its own key heads.

  Without a mesh, or if devices cannot share the heads evenly, this only calls
  `fn`.

  Args:
    fn: returns arrays [B, K, ...], computed for each head alone.
    of_heads: arrays [B, K, ...], whose rows all devices have, or their own in a
      `jax.shard_map` over rows.
    other: a tree of arrays that all heads read.
    rules: mesh axes of each letter.
  """
  mesh = jax.sharding.get_abstract_mesh()
  axes = {*mesh.axis_names} - {*mesh.manual_axes}
  if not axes or not rules_lib.is_even('K', of_heads[0].shape[1], rules):
    return fn(*of_heads, other)
  heads = rules_lib.ambient_axes('K', rules) or None
  mesh_lib.devices_along(mesh, heads or ())
  by_head = PartitionSpec(None, heads)
  return jax.shard_map(
    fn,
    in_specs=(*(by_head for _ in of_heads), PartitionSpec()),
    out_specs=by_head,
    axis_names=axes,
    check_vma=False,  # Kernels do not say how their results vary.
  )(*of_heads, other)


def _gather_leaf(axes, dtype, leaf, spec, others):
  """Gathers a parameter over the axes of rows.

  Args:
    axes: those of rows, of which this runs on one device.
    dtype: as in `map_rows`.
    leaf: the part of the parameter on this device.
    spec: how `axes` shard the parameter.
    others: how the other axes do.
  """
  # Its gradient is a sum over all rows, also over axes that do not shard it.
  copied = tuple(axis for axis in axes if axis not in jax.tree.leaves([*spec]))
  if copied:
    leaf = jax.lax.pcast(leaf, copied, to='varying')
  for i, names in enumerate(spec):
    if names:
      narrow = leaf.dtype if leaf.ndim == 1 else dtype
      leaf = _gather(leaf, names, i, narrow, others)
  return leaf


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def _gather(x, names, dimension, dtype, others):
  """Gathers shards in `dtype`; the gradient is summed in the dtype of `x`."""

  def local(x):
    return jax.lax.all_gather(x, names, axis=dimension, tiled=True)

  return _on_parts(local, others)(x.astype(dtype)).astype(x.dtype)


def _gather_forward(x, names, dimension, dtype, others):
  return _gather(x, names, dimension, dtype, others), None


def _gather_backward(names, dimension, dtype, others, _, gradient):
  """Adds up and scatters along the leading dimension.

  Along the last one, a TPU adds up everything on every device: twice as many
  bytes are sent, and each device holds the whole sum.
  """
  del dtype

  def local(gradient):
    n = jax.lax.axis_size(names)
    shape = gradient.shape
    parts = gradient.reshape(
      *shape[:dimension], n, shape[dimension] // n, *shape[dimension + 1 :]
    )
    parts = jnp.moveaxis(parts, dimension, 0)
    return jax.lax.psum_scatter(parts, names, scatter_dimension=0)

  return (_on_parts(local, others)(gradient),)


_gather.defvjp(_gather_forward, _gather_backward)


def _on_parts(fn, spec):
  """Returns `fn` of an array, for each device's part by the axes of `spec`.

  XLA would gather these parts for a collective over other axes.
  """
  axes = {*jax.tree.leaves([*spec])}
  if not axes:
    return fn
  return jax.shard_map(fn, in_specs=spec, out_specs=spec, axis_names=axes)
