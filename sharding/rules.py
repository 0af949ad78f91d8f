"""Layouts on a mesh from the dimension letters in a name.

  sharding(mesh, letters_of('up_DF'), shape)  # P('fsdp', 'tensor')

The last key on the path of a parameter, and of everything shaped like it such
as Adam's moments, spells its dimensions. Letters align right. Under `layers`
there is one more leading dimension without a letter, the stack of scanned
layers, which is not sharded.
"""

from collections.abc import Iterable, Mapping
import math
import re

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sharding import mesh as mesh_lib

Axes = str | tuple[str, ...]
Rules = Mapping[str, Axes]

DEFAULT: Rules = {
  'B': ('data', 'fsdp'),
  'D': 'fsdp',
  'F': 'tensor',
  'H': 'tensor',
  'K': 'tensor',
  'S': 'tensor',
  'V': 'tensor',
  'E': 'expert',
}
# Letters of activations, for `shard`: positions on all devices, or divided.
WHOLE, DIVIDED = ('B', None), ('B', 'S')
SUFFIX = re.compile(r'_([A-Z]+)$')


def letters_of(name: str) -> tuple[str, ...]:
  """The dimensions that a name spells: `up_DF` is `('D', 'F')`."""
  match = SUFFIX.search(name)
  return tuple(match[1]) if match else ()


def dimensions(path, shape) -> tuple[str, ...] | None:
  """One letter a dimension ('' for none), by the keys on the path to an array.

  Returns:
    None where the name spells another rank than the array has, as for the
    statistics of a factored optimizer.
  """
  keys = [k.key for k in path if isinstance(k, jax.tree_util.DictKey)]
  letters = letters_of(str(keys[-1])) if keys else ()
  if not letters:
    return ('',) * len(shape)
  letters = ('',) * ('layers' in keys) + letters
  return letters if len(letters) == len(shape) else None


def mesh_axes(
  mesh: Mesh, letter: str, rules: Rules = DEFAULT
) -> tuple[str, ...]:
  """The axes of `mesh` that shard a dimension of this letter."""
  want = rules.get(letter) or ()
  want = (want,) if isinstance(want, str) else want
  return tuple(axis for axis in want if axis in mesh.axis_names)


def partition_spec(
  mesh: Mesh,
  letters: Iterable[str],
  shape: tuple[int, ...],
  rules: Rules = DEFAULT,
) -> PartitionSpec:
  """The layout of an array whose dimensions have these letters.

  Axes that the mesh lacks are ignored; dimensions of size one are not sharded.

  Raises:
    ValueError: if two letters use one mesh axis, or a dimension does not divide
      evenly among its devices.
  """
  letters, axes, taken = tuple(letters), [], {}
  for letter, size in zip(letters, shape, strict=True):
    have = mesh_axes(mesh, letter, rules)
    if size == 1:  # Optimizers store one zero in place of absent statistics.
      have = ()
    for axis in have:
      if taken.setdefault(axis, letter) != letter or letters.count(letter) > 1:
        raise ValueError(
          f'An array of dimensions {letters} would use the mesh axis {axis!r} '
          f'twice, for {taken[axis]} and for {letter}: give one of the letters '
          'another axis, or none.'
        )
    devices = mesh_lib.devices_along(mesh, have)
    if size % devices:
      raise ValueError(
        f'Dimension {letter} of an array of shape {shape} has size {size}, '
        f'which {devices} devices of {have} cannot share evenly: choose '
        'mesh axes whose sizes divide it.'
      )
    axes.append(have if len(have) > 1 else have[0] if have else None)
  return PartitionSpec(*axes)


def devices_of(letter: str, size: int, rules: Rules = DEFAULT) -> int:
  """The devices of the ambient mesh that share a dimension; 1 without one."""
  n = _devices(letter, rules)
  return 1 if size % n else n


def is_even(letter: str, size: int, rules: Rules = DEFAULT) -> bool:
  """Whether the devices of the ambient mesh can share a dimension evenly."""
  return not size % _devices(letter, rules)


def local_group(group_size: int, rows: int, rules: Rules = DEFAULT) -> int:
  """The adjacent rows of a group that each device of the ambient mesh has.

  Devices that have a part of a group each can read what its rows share, such as
  a prompt, as if the part were a group of its own. So can a call with a part of
  a group.

  Args:
    group_size: rows of a group.
    rows: of all devices together.
    rules: mesh axes of each letter.
  """
  return math.gcd(group_size, rows // devices_of('B', rows, rules))


def _devices(letter: str, rules: Rules) -> int:
  mesh = jax.sharding.get_abstract_mesh()
  return mesh_lib.devices_along(mesh, ambient_axes(letter, rules))


def ambient_axes(letter: str, rules: Rules = DEFAULT) -> tuple[str, ...]:
  """The axes of the ambient mesh that shard a dimension of this letter.

  In a `jax.shard_map`, a device has only its own part of a dimension, so the
  axes that it maps shard nothing.
  """
  mesh = jax.sharding.get_abstract_mesh()
  axes = () if mesh.empty else mesh_axes(mesh, letter, rules)
  return tuple(axis for axis in axes if axis not in mesh.manual_axes)


def shard_rows(x, rules: Rules = DEFAULT):
  """Shards the rows of `x[row, ...]` over the ambient mesh, if there is one.

  A hint for where rows and parameters are sharded over the same axes. Without
  it, XLA might gather the rows and multiply them by a shard of the parameters,
  instead of gathering the parameters. Rows that do not divide evenly are left
  to XLA.
  """
  return shard(x, 'B', rules)


def shard(x, letters: Iterable[str | None], rules: Rules = DEFAULT):
  """Shards the first dimensions of `x` over the ambient mesh, if there is one.

  Args:
    x: an array.
    letters: of its first dimensions; None for one of which each device needs
      the whole. Other dimensions are left to XLA, and so are those that do not
      divide evenly.
    rules: mesh axes of each letter.
  """
  mesh, layout = jax.sharding.get_abstract_mesh(), []
  if {*mesh.axis_names} <= {*mesh.manual_axes}:
    return x  # There is no mesh, or `jax.shard_map` has divided `x` already.
  for letter, size in zip(letters, x.shape, strict=False):
    axes = ambient_axes(letter, rules) if letter else ()
    is_even = not size % mesh_lib.devices_along(mesh, axes)
    is_left = letter and not (axes and is_even)
    layout.append(PartitionSpec.UNCONSTRAINED if is_left else axes or None)
  if all(some is PartitionSpec.UNCONSTRAINED for some in layout):
    return x
  layout += [PartitionSpec.UNCONSTRAINED] * (x.ndim - len(layout))
  return jax.lax.with_sharding_constraint(x, PartitionSpec(*layout))


def gather_sequence(x_BSD):
  """Gathers positions that are sharded, before products with sharded weights.

  Gathers over the axis `tensor` in the forward pass, and adds up and scatters
  over it in the backward pass. In sequence parallelism, arXiv:2205.05198, what
  a layer computes for each position alone is divided over that axis, and so is
  what is stored between layers.
  """
  return _gather_sequence(x_BSD) if _is_divided(x_BSD) else x_BSD


def scatter_sequence(x_BSD):
  """Shards positions after products with sharded weights: a sum over an axis.

  Adds up and scatters in the forward pass, and gathers in the backward pass;
  see `gather_sequence`.
  """
  return _scatter_sequence(x_BSD) if _is_divided(x_BSD) else x_BSD


@jax.custom_vjp
def _gather_sequence(x_BSD):
  return shard(x_BSD, WHOLE)


@jax.custom_vjp
def _scatter_sequence(x_BSD):
  return shard(x_BSD, DIVIDED)


_gather_sequence.defvjp(
  lambda x: (_gather_sequence(x), None),
  lambda _, x_bar: (shard(x_bar, DIVIDED),),
)
_scatter_sequence.defvjp(
  lambda x: (_scatter_sequence(x), None),
  lambda _, x_bar: (shard(x_bar, WHOLE),),
)


def _is_divided(x_BSD) -> bool:
  return devices_of('S', x_BSD.shape[1]) > 1


def gather(tree, rules: Rules = DEFAULT):
  """Gathers parameters once, for a call that reads each of them many times.

  Axes that also shard rows are gathered; others, such as `tensor`, stay
  sharded. Without an ambient mesh nothing changes. Parameters that were rounded
  before are gathered so: otherwise XLA might round them after.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty:
    return tree

  def gathered(path, leaf):
    for spec in _specs(mesh, path, leaf, rules):
      leaf = jax.lax.with_sharding_constraint(leaf, spec)
    return leaf

  return jax.tree_util.tree_map_with_path(gathered, tree)


def gathers(tree, rules: Rules = DEFAULT) -> bool:
  """Whether `gather` sends parameters between devices of the ambient mesh."""
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty:
    return False
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  specs = (_specs(mesh, path, leaf, rules) for path, leaf in leaves)
  return any(own != gathered for own, gathered in specs)


def _specs(mesh, path, leaf, rules: Rules) -> list[PartitionSpec]:
  """The partition of a parameter, and that in which it is gathered."""
  of_rows = mesh_axes(mesh, 'B', rules)
  rest = {
    letter: tuple(a for a in mesh_axes(mesh, letter, rules) if a not in of_rows)
    for letter in rules
  }
  letters = dimensions(path, leaf.shape) or ('',) * leaf.ndim
  return [
    partition_spec(mesh, letters, leaf.shape, some) for some in (rules, rest)
  ]


def shardings(tree, mesh: Mesh, rules: Rules = DEFAULT):
  """A tree of shardings for a tree of parameters, by the names of its leaves.

  Raises:
    ValueError: for a parameter whose name does not spell its dimensions, or
      that the mesh cannot divide.
  """

  def sharding(path, leaf):
    letters = _parameter_dimensions(path, leaf.shape)
    try:
      layout = partition_spec(mesh, letters, leaf.shape, rules)
    except ValueError as error:
      where = jax.tree_util.keystr(path)
      raise ValueError(f'Parameter {where}: {error}') from None
    return NamedSharding(mesh, layout)

  return jax.tree_util.tree_map_with_path(sharding, tree)


def check_parameters(state):
  """Refuses a workflow's state whose parameters do not spell their dimensions.

  Without letters, an array is replicated on every device. That is right for
  counters and rows of data, and a silent waste of memory for parameters. What
  lies below a field `params` or `opt_state`, as in a train state, is checked.
  Optimizer state of another rank than its parameter, such as Adafactor's
  factored statistics, is small and may be replicated.

  Raises:
    ValueError: for the first such parameter of two or more dimensions.
  """
  for path, leaf in jax.tree_util.tree_leaves_with_path(state):
    fields = [k.name for k in path if isinstance(k, jax.tree_util.GetAttrKey)]
    if 'opt_state' in fields and dimensions(path, leaf.shape) is None:
      continue
    if 'opt_state' in fields or 'params' in fields:
      _parameter_dimensions(path, leaf.shape)


def _parameter_dimensions(path, shape) -> tuple[str, ...]:
  """The letters of a parameter; an error where its name does not spell them."""
  letters = dimensions(path, shape)
  if letters is None or (len(shape) > 1 and not any(letters)):
    raise ValueError(
      f'Parameter {jax.tree_util.keystr(path)} of shape {shape} must end in '
      'one letter for each of its dimensions (but for the first of those under '
      "`layers`), such as 'kernel_DF': its layout on a mesh follows from them, "
      'and without them every device would hold all of it. Declare it by '
      "`self.param('kernel_DF', ...)`, or rename it in the policy's init."
    )
  return letters
