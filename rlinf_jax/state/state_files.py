"""Files of a state, of which each process writes and reads what it holds.

The folder of a state has a part for each place that owns some of its arrays,
which orbax writes. Arrays are found by name, so another plan, whose places own
others, reads it as well as a run in one process. An array without elements is
in no file.
"""

from collections.abc import Callable, Iterable, Mapping
import math
import pathlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from stages import base


class Leaf(NamedTuple):
  """An array of a state.

  Attributes:
    name: its path, such as 'actor.params.embed_VD'.
    key: its path as `jax.tree_util.keystr` writes it.
    is_frozen: whether it is read again where a run first read it, and is in no
      checkpoint.
  """

  name: str
  key: str
  is_frozen: bool


def leaves(structure: Any) -> list[Leaf]:
  """The arrays of a state, in the order of its leaves.

  Args:
    structure: the tree structure of the state.
  """
  tree = jax.tree.unflatten(structure, range(structure.num_leaves))
  return [
    Leaf(
      '.'.join(map(_part, path)),
      jax.tree_util.keystr(path),
      jax.tree_util.DictKey(base.FROZEN) in path,
    )
    for path, _ in jax.tree_util.tree_leaves_with_path(tree)
  ]


def _part(key) -> str:
  """The name of one key of a path."""
  for attribute in ('name', 'key', 'idx'):
    if hasattr(key, attribute):
      return str(getattr(key, attribute))
  return str(key)


def start_writing(
  folder: pathlib.Path, arrays: Mapping[str, jax.Array]
) -> Callable[[], None]:
  """Starts to write a part of a state, and copies what is overwritten later.

  If several processes hold the arrays, all of them make this call, and each
  writes its own shards.

  Args:
    folder: of the part; it must not exist, but its parent does.
    arrays: by name.

  Returns:
    A function that blocks until the part is complete.

  Raises:
    FileNotFoundError: if the parent does not exist.
  """
  import orbax.checkpoint as ocp  # It takes half a second.

  if not folder.parent.is_dir():
    raise FileNotFoundError(
      f'{folder.parent} does not exist on the machine of a place that is to '
      'write its part of a checkpoint there: give a --workdir that all '
      'machines share.'
    )
  # The next step overwrites the state while a thread still writes it.
  copies = {name: x.copy() for name, x in arrays.items() if x.size}
  if not copies:
    return lambda: None
  # No context: orbax would leave it where `finish` is never called, as after a
  # failure of another part, and close it after JAX when the program ends.
  writer = ocp.StandardCheckpointer()
  try:
    writer.save(folder.absolute(), copies)
  except BaseException:
    writer.close()
    raise

  def finish():
    try:
      writer.wait_until_finished()
    finally:
      writer.close()

  return finish


class Stored(NamedTuple):
  """An array in a file.

  Attributes:
    part: the folder of the part that holds it.
    shape: of the array; of the numbers that stand for them, for random keys.
    dtype: likewise.
  """

  part: pathlib.Path
  shape: tuple[int, ...]
  dtype: Any


def stored(folder: pathlib.Path) -> dict[str, Stored]:
  """The arrays in the files of a state, by name.

  Raises:
    FileNotFoundError: if the folder does not exist, as on another machine.
    ValueError: if it has no parts, as those of earlier versions.
  """
  import orbax.checkpoint as ocp

  if not folder.is_dir():
    raise FileNotFoundError(
      f'There is no {folder} on the machine of a process that is to read a '
      'checkpoint there: give a --workdir that all machines share, with '
      'checkpoints that were copied whole.'
    )
  if (folder / '_METADATA').exists():
    raise ValueError(
      f'{folder} was written by an earlier version of this package, which did '
      'not divide a state into parts: continue with that version, or begin the '
      'run again in another --workdir.'
    )
  found = {}
  with ocp.StandardCheckpointer() as reader:
    for part in sorted(folder.absolute().iterdir()):
      if (part / '_METADATA').exists():
        arrays = reader.metadata(part).item_metadata.tree
        for name, x in arrays.items():
          found[name] = Stored(part, tuple(x.shape), x.dtype)
  return found


def names(part: pathlib.Path) -> set[str]:
  """The names of the arrays that orbax has written into a folder."""
  import orbax.checkpoint as ocp

  # A checkpointer would warn that a part of a checkpoint is none by itself.
  tree = ocp.PyTreeCheckpointHandler().metadata(part).tree
  return {leaf.name for leaf in leaves(jax.tree.structure(tree))}


def read(
  found: Mapping[str, Stored], wanted: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, jax.Array]:
  """Reads some arrays of a state, each process its shards alone.

  Args:
    found: the arrays in files, as `stored` returns them.
    wanted: shape, dtype and sharding of each, by name.

  Raises:
    ValueError: if an array is in no file.
  """
  import orbax.checkpoint as ocp

  arrays, by_part = {}, {}
  for name, x in wanted.items():
    if not math.prod(x.shape):
      arrays[name] = _empty(x)
    elif name not in found:
      raise ValueError(
        f'{name} is in no file of the checkpoint, which holds '
        f'{", ".join(sorted(found)[:3])} and others: give the recipe that the '
        'run was begun with, as in its config.gin.'
      )
    else:
      by_part.setdefault(found[name].part, {})[name] = x
  with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
    for part, some in by_part.items():
      arguments = {
        name: ocp.ArrayRestoreArgs(
          sharding=x.sharding, global_shape=x.shape, dtype=x.dtype
        )
        for name, x in some.items()
      }
      arrays |= reader.restore(
        part,
        args=ocp.args.PyTreeRestore(
          item=some, restore_args=arguments, partial_restore=True
        ),
      )
  return arrays


def read_all(folder: pathlib.Path) -> dict[str, jax.Array]:
  """All arrays of a state, on the first device; random keys as numbers."""
  layout = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  found = stored(folder)
  wanted = {
    name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout)
    for name, x in found.items()
  }
  return read(found, wanted)


def _empty(x: jax.ShapeDtypeStruct) -> jax.Array:
  """An array without elements."""
  if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
    return jax.device_put(jax.random.split(jax.random.key(0), 0), x.sharding)
  return jnp.zeros(x.shape, x.dtype, device=x.sharding)


def differences(
  found: Mapping[str, Stored], wanted: Iterable[tuple[str, Any]]
) -> list[str]:
  """Lists faults of the arrays of a folder, as parts of a sentence.

  Args:
    found: as `stored` returns it.
    wanted: names and shapes of the arrays to read.
  """
  there = {name: _text(x) for name, x in found.items()}
  now = {
    name: _text(jax.eval_shape(jax.random.key_data, x) if _is_key(x) else x)
    for name, x in wanted
    if math.prod(x.shape) or name in there
  }
  return [
    f'{name} is {there.get(name, "missing")} there and '
    f'{now.get(name, "missing")} now'
    for name in sorted(there.keys() | now.keys())
    if there.get(name) != now.get(name)
  ]


def _is_key(x) -> bool:
  return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _text(x) -> str:
  """The type and the shape of an array."""
  return f'{jnp.dtype(x.dtype).name}{list(x.shape)}'
