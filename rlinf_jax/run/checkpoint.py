"""Checkpoints of a run, by orbax: whole or not there at all."""

import os
import pathlib
from typing import Any, NamedTuple

import jax
import numpy as np


class CheckpointError(RuntimeError):
  """A checkpoint could not be written; says which one still stands."""


class Saved(NamedTuple):
  """What a checkpoint holds.

  Attributes:
    step: finished updates.
    state: the workflow's state.
    source: the source's state.
    metrics: numbers after each of the last steps, by updates finished; as many
      as steps may overlap, since the source reads them that much later.
  """

  step: int
  state: Any
  source: Any
  metrics: dict[int, dict[str, float]]


class Checkpoints:
  """The checkpoints of one run; writes one while training goes on."""

  def __init__(self, folder: str | os.PathLike, keep: int):
    """Opens a folder of checkpoints, which need not exist.

    Args:
      folder: where they lie; what a killed process left unfinished is removed.
      keep: how many of the newest to keep.
    """
    # Half a second to import, which a run's first step need not wait for.
    import orbax.checkpoint as ocp

    self._ocp = ocp
    self.folder = pathlib.Path(folder).absolute()
    self._manager = ocp.CheckpointManager(
      self.folder,
      options=ocp.CheckpointManagerOptions(
        max_to_keep=keep,
        create=True,
        cleanup_tmp_directories=True,
        enable_async_checkpointing=True,
      ),
    )

  def latest(self) -> int | None:
    """Step of the newest complete checkpoint."""
    return self._manager.latest_step()

  def save(self, saved: Saved):
    """Begins to write a checkpoint; the one before is finished first.

    Raises:
      CheckpointError: if this or the one before cannot be written.
    """
    ocp = self._ocp
    # The next step overwrites the state's memory while a thread still writes.
    state = jax.tree.map(
      lambda x: x.copy() if isinstance(x, jax.Array) else x, saved.state
    )
    metrics = {
      str(step): {k: float(v).hex() for k, v in numbers.items()}
      for step, numbers in saved.metrics.items()
    }
    self._guard(
      lambda: self._manager.save(
        saved.step,
        args=ocp.args.Composite(
          state=ocp.args.StandardSave(state),
          source=ocp.args.StandardSave(saved.source),
          metrics=ocp.args.JsonSave(metrics),
        ),
      )
    )

  def load(self, state, source) -> Saved:
    """The newest complete checkpoint.

    Args:
      state: a tree of arrays like the state, laid out as it shall be.
      source: a tree of NumPy arrays like the source's state.
    """
    ocp, step = self._ocp, self.latest()
    like = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
    made = self._manager.restore(
      step,
      args=ocp.args.Composite(
        state=ocp.args.StandardRestore(like),
        source=ocp.args.StandardRestore(jax.tree.map(np.asarray, source)),
        metrics=ocp.args.JsonRestore(),
      ),
    )
    metrics = {
      int(step): {k: float.fromhex(v) for k, v in numbers.items()}
      for step, numbers in made.metrics.items()
    }
    return Saved(step, made.state, made.source, metrics)

  def close(self):
    """Waits until all is written.

    Raises:
      CheckpointError: if it cannot be.
    """
    self._guard(self._manager.wait_until_finished)
    self._manager.close()

  def _guard(self, act):
    """Turns whatever the libraries below raise into one sentence."""
    try:
      act()
    except Exception as error:
      stands = self._manager.latest_step()
      kept = (
        f'The checkpoint of step {stands} stands: free space and continue with '
        '--resume.'
        if stands is not None
        else 'There is none yet to continue from: free space and start again.'
      )
      raise CheckpointError(
        f'A checkpoint could not be written to {self.folder} '
        f'({str(error).splitlines()[0]}). {kept}'
      ) from error
