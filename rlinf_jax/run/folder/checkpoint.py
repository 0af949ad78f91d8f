"""Checkpoints of a run, written by orbax, each complete or absent."""

import os
import pathlib
from typing import Any, NamedTuple

import jax
import numpy as np

from rlinf_jax.run.folder import frozen_weights


class CheckpointError(RuntimeError):
  """A checkpoint could not be written; names the newest complete one."""


class CheckpointState(NamedTuple):
  """The contents of a checkpoint.

  Attributes:
    step: finished updates.
    state: the workflow's state.
    source: the source's state.
    metrics: metrics after each of the last steps, by updates finished: one
      more than the workflow's staleness, because the source reads the metrics
      of the step that many steps before.
  """

  step: int
  state: Any
  source: Any
  metrics: dict[int, dict[str, float]]


def _shapes(tree: Any) -> dict[str, str]:
  """Path → type and shape of the arrays in a tree, '' of other leaves."""

  def name(key):
    for attribute in ('name', 'key', 'idx'):
      if hasattr(key, attribute):
        return str(getattr(key, attribute))
    return str(key)

  def text(x):
    if not hasattr(x, 'shape') or getattr(x, 'dtype', None) is None:
      return ''
    return f'{getattr(x.dtype, "name", x.dtype)}{list(x.shape)}'

  return {
    '.'.join(map(name, path)): text(x)
    for path, x in jax.tree_util.tree_leaves_with_path(tree)
  }


class Checkpoints:
  """The checkpoints of one run; writes one while training goes on."""

  def __init__(
    self, folder: str | os.PathLike, keep: int, *, read_only: bool = False
  ):
    """Opens a folder of checkpoints, which need not exist.

    Args:
      folder: the folder; unfinished checkpoints of a killed process are
        removed.
      keep: number of checkpoints to keep, the newest.
      read_only: changes nothing, as where another process may be writing.
    """
    # Imported here because it takes half a second.
    import orbax.checkpoint as ocp

    self._ocp = ocp
    self.folder = pathlib.Path(folder).absolute()
    self._manager = ocp.CheckpointManager(
      self.folder,
      options=ocp.CheckpointManagerOptions(
        max_to_keep=keep,
        create=not read_only,
        cleanup_tmp_directories=not read_only,
        enable_async_checkpointing=not read_only,
        read_only=read_only,
      ),
    )

  def steps(self) -> list[int]:
    """Steps of all complete checkpoints."""
    return list(self._manager.all_steps())

  def latest(self) -> int | None:
    """Step of the newest complete checkpoint."""
    return self._manager.latest_step()

  def save(self, contents: CheckpointState):
    """Starts to write a checkpoint, after the previous one is complete.

    Of frozen parameters, it holds checksums.

    Raises:
      CheckpointError: if this or the previous one cannot be written.
    """
    ocp = self._ocp
    # The next step overwrites the state while a thread still writes it.
    state = jax.tree.map(
      lambda x: x.copy() if isinstance(x, jax.Array) else x,
      frozen_weights.remove(contents.state),
    )
    metrics = {
      str(step): {k: float(v).hex() for k, v in numbers.items()}
      for step, numbers in contents.metrics.items()
    }
    self._write(
      lambda: self._manager.save(
        contents.step,
        args=ocp.args.Composite(
          state=ocp.args.StandardSave(state),
          source=ocp.args.StandardSave(contents.source),
          metrics=ocp.args.JsonSave(metrics),
          frozen=ocp.args.JsonSave(frozen_weights.checksums(contents.state)),
        ),
      )
    )

  def load(self, state, source, step: int | None = None) -> CheckpointState:
    """Reads a complete checkpoint.

    Args:
      state: arrays with the shapes, dtypes and shardings of the result, and the
        frozen parameters of the run.
      source: a source's state; its NumPy arrays give shapes and dtypes.
      step: that of the checkpoint; the newest if None.

    Raises:
      ValueError: if the frozen parameters are others than when it was written,
        or arrays have other names, shapes or types.
    """
    ocp, step = self._ocp, self.latest() if step is None else step
    trained = frozen_weights.remove(state)
    out_shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, trained)
    self._check_shapes(step, out_shapes)
    restored = self._manager.restore(
      step,
      args=ocp.args.Composite(
        state=ocp.args.StandardRestore(out_shapes),
        source=ocp.args.StandardRestore(jax.tree.map(np.asarray, source)),
        metrics=ocp.args.JsonRestore(),
        frozen=ocp.args.JsonRestore(),
      ),
    )
    if restored.frozen != frozen_weights.checksums(state):
      raise ValueError(
        f'The checkpoint of step {step} in {self.folder} was trained beside '
        'other frozen weights than those that are given now: give it the '
        'model, teacher and reward models that the run began with.'
      )
    metrics = {
      int(step): {k: float.fromhex(v) for k, v in numbers.items()}
      for step, numbers in restored.metrics.items()
    }
    whole = frozen_weights.restore(restored.state, state)
    return CheckpointState(step, whole, restored.source, metrics)

  def _check_shapes(self, step: int, wanted):
    """Compares a checkpoint with the arrays that are to be read from it."""
    ocp = self._ocp
    with ocp.StandardCheckpointer() as reader:
      found = reader.metadata(self.folder / str(step) / 'state')
    found, wanted = map(_shapes, (found.item_metadata.tree, wanted))
    wrong = [
      f'{name} is {found.get(name, "missing")} there and '
      f'{wanted.get(name, "missing")} now'
      for name in sorted(found.keys() | wanted.keys())
      if '' not in (found.get(name), wanted.get(name))
      if found.get(name) != wanted.get(name)
    ]
    if wrong:
      more = f'; and {len(wrong) - 3} more' if len(wrong) > 3 else ''
      raise ValueError(
        f'The checkpoint of step {step} in {self.folder} does not fit the '
        f'recipe: {"; ".join(wrong[:3])}{more}. Give the sizes and the '
        'optimizer that the run was begun with, as in its config.gin, or '
        'choose another --workdir.'
      )

  def close(self):
    """Waits until all checkpoints are written.

    Raises:
      CheckpointError: if one cannot be written.
    """
    self._write(self._manager.wait_until_finished)
    self._manager.close()

  def _write(self, call):
    """Calls a function of orbax; any exception becomes a CheckpointError."""
    try:
      call()
    except Exception as error:
      newest = self._manager.latest_step()
      advice = (
        f'The checkpoint of step {newest} is intact: mend that, such as a full '
        'disk, and continue with --resume.'
        if newest is not None
        else 'There is no earlier checkpoint: mend that, such as a full disk, '
        'and start again.'
      )
      raise CheckpointError(
        f'A checkpoint could not be written to {self.folder} '
        f'({str(error).splitlines()[0]}). {advice}'
      ) from error
