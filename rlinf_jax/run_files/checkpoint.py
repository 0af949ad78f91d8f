"""Checkpoints of a run, written by orbax, each complete or absent.

The state is written by the processes that hold it (`state_files`); orbax's
manager completes a checkpoint when all of them have.
"""

from collections.abc import Callable
import contextlib
import logging
import os
import pathlib
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from rlinf_jax.config import suggestions
from rlinf_jax.runtime.base import ProcessDiedError
from rlinf_jax.state import saved_state, state_files, state_readers


class CheckpointError(RuntimeError):
  """A checkpoint could not be written; names the newest complete one."""


class StateWriter(Protocol):
  """A holder of a state that writes it, such as a `runtime.base.Runtime`."""

  def start_writing(self, folder: pathlib.Path) -> Callable[[], None]:
    """As `Runtime.start_writing`."""

  def checksums(self) -> dict[str, int]:
    """As `Runtime.checksums`."""


class CheckpointState(NamedTuple):
  """The contents of a checkpoint.

  Attributes:
    step: finished updates.
    state: reads the workflow's state.
    source: the source's state.
    metrics: metrics after each of the last steps, by updates finished: one
      more than the workflow's staleness, because the source reads the metrics
      of the step that many steps before.
  """

  step: int
  state: state_readers.StateReader
  source: Any
  metrics: dict[int, dict[str, float]]


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

    from rlinf_jax.run_files import state_item

    # orbax logs forty lines per checkpoint; its failures are reported here.
    logging.getLogger('absl').addFilter(_is_not_of_orbax)
    self._ocp, self._state_item = ocp, state_item
    self.folder = pathlib.Path(folder).absolute()
    self._manager = ocp.CheckpointManager(
      self.folder,
      options=ocp.CheckpointManagerOptions(
        max_to_keep=keep,
        create=not read_only,
        cleanup_tmp_directories=not read_only,
        enable_async_checkpointing=not read_only,
        # Other processes write into the folder of the state.
        async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
        read_only=read_only,
      ),
    )

  def steps(self) -> list[int]:
    """Steps of all complete checkpoints."""
    return list(self._manager.all_steps())

  def latest(self) -> int | None:
    """Step of the newest complete checkpoint."""
    return self._manager.latest_step()

  def save(
    self,
    step: int,
    state: StateWriter,
    source: Any,
    metrics: dict[int, dict[str, float]],
  ):
    """Starts to write a checkpoint, after the previous one is complete.

    Of frozen parameters, it holds checksums.

    Args:
      step: finished updates.
      state: writes the workflow's state.
      source: as in `CheckpointState`.
      metrics: likewise.

    Raises:
      CheckpointError: if this or the previous one cannot be written.
      ProcessDiedError: if a process died that was to write a part of it.
    """
    args = self._ocp.args
    texts = {
      str(step): {k: float(v).hex() for k, v in numbers.items()}
      for step, numbers in metrics.items()
    }

    def write():
      self._manager.wait_until_finished()
      self._manager.save(
        step,
        args=args.Composite(
          state=self._state_item.Save(state.start_writing),
          source=args.StandardSave(_nested(source)),
          metrics=args.JsonSave(texts),
          frozen=args.JsonSave(state.checksums()),
        ),
      )

    self._write(write)

  def load(
    self, shapes: Any, first: state_readers.StateReader, source: Any
  ) -> CheckpointState:
    """Reads the newest checkpoint, but for the arrays of its state.

    Args:
      shapes: a tree of the shapes and types of the whole state.
      first: reads the frozen parameters of the run.
      source: a source's state; its NumPy arrays give shapes and dtypes.

    Raises:
      ValueError: as `state`, or for another source.
    """
    ocp, step = self._ocp, self.latest()
    state = self.state(shapes, first, step)
    source = jax.tree.map(np.asarray, source)
    self._check_source(step, source)
    restored = self._manager.restore(
      step,
      args=ocp.args.Composite(
        source=ocp.args.StandardRestore(_nested(source)),
        metrics=ocp.args.JsonRestore(),
      ),
    )
    metrics = {
      int(step): {k: float.fromhex(v) for k, v in numbers.items()}
      for step, numbers in restored.metrics.items()
    }
    tree = jax.tree.structure(source)
    found = jax.tree.leaves(restored.source)[: tree.num_leaves]
    found = jax.tree.unflatten(tree, found)
    return CheckpointState(step, state, found, metrics)

  def state(
    self, shapes: Any, first: state_readers.StateReader, step: int | None = None
  ) -> saved_state.SavedState:
    """The state in a complete checkpoint, which may be of another source.

    Args:
      shapes: as for `load`.
      first: likewise.
      step: that of the checkpoint; the newest if None.

    Raises:
      ValueError: if frozen parameters had other names when it was written, or
        other arrays other names, shapes or types. The bits of frozen parameters
        are compared where the state is read.
    """
    ocp, step = self._ocp, self.latest() if step is None else step
    self._check_shapes(step, shapes)
    frozen = self._manager.restore(
      step, args=ocp.args.Composite(frozen=ocp.args.JsonRestore())
    ).frozen
    state = saved_state.SavedState(str(self.folder), step, frozen, first)
    leaves = state_files.leaves(jax.tree.structure(shapes))
    if {x.key for x in leaves if x.is_frozen} != frozen.keys():
      raise ValueError(state.other_weights())
    return state

  def _check_source(self, step: int, source: Any):
    """Compares the source of a checkpoint with the one that is to go on."""
    found = state_files.names(self.folder / str(step) / 'source')
    leaves = state_files.leaves(jax.tree.structure(_nested(source)))
    now = [leaf.name for leaf in leaves]
    if found != {*now}:
      raise ValueError(
        f'The checkpoint of step {step} in {self.folder} is that of another '
        f'source, whose state is {suggestions.join_names(sorted(found))}, '
        f'and is {suggestions.join_names(sorted(now))} now: give the source '
        'that the run was begun with, as in its config.gin, or choose another '
        '--workdir.'
      )

  def _check_shapes(self, step: int, shapes: Any):
    """Compares a checkpoint with the arrays that are to be read from it."""
    leaves = state_files.leaves(jax.tree.structure(shapes))
    wanted = [
      (leaf.name, x)
      for leaf, x in zip(leaves, jax.tree.leaves(shapes), strict=True)
      if not leaf.is_frozen
    ]
    found = state_files.stored(self.folder / str(step) / saved_state.STATE)
    if wrong := state_files.differences(found, wanted):
      more = f'; and {len(wrong) - 3} more' if len(wrong) > 3 else ''
      raise ValueError(
        f'The checkpoint of step {step} in {self.folder} does not fit the '
        f'recipe: {"; ".join(wrong[:3])}{more}. Give the sizes and the '
        'optimizer that the run was begun with, as in its config.gin, or '
        'choose another --workdir.'
      )

  def wait(self):
    """Waits until all checkpoints are written.

    Raises:
      CheckpointError: if one cannot be written.
      ProcessDiedError: if a process died that was to write a part of it.
    """
    self._write(self._manager.wait_until_finished)

  def abandon(self):
    """Waits until nothing is being written, after the death of a process.

    Raises:
      CheckpointError: if a checkpoint cannot be written for another reason,
        such as a full disk, after which other processes may have been ended.
    """
    # The run goes on from an earlier checkpoint.
    with contextlib.suppress(ProcessDiedError):
      self.wait()

  def close(self):
    """Ends writing, as `wait`."""
    self.wait()
    self._manager.close()

  def _write(self, call):
    """Calls a function of orbax; an exception becomes a CheckpointError."""
    try:
      call()
    except ProcessDiedError:
      # The run goes on from the newest complete checkpoint. Orbax forgot those
      # that the new one was to replace, which are still there.
      self._manager.reload()
      raise
    except Exception as error:
      self._manager.reload()
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
        f'({(str(error) or repr(error)).splitlines()[0]}). {advice}'
      ) from error


def _is_not_of_orbax(record: logging.LogRecord) -> bool:
  """Whether a line of a log was written by another module."""
  return '/orbax/checkpoint/' not in record.pathname


def _nested(source: Any) -> Any:
  """A source's state for orbax, which refuses single arrays and empty trees."""
  if not jax.tree.leaves(source):
    return [np.zeros(1)]
  return [source] if jax.tree_util.all_leaves([source]) else source
