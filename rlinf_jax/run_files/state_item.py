"""The item of a checkpoint that is written by those who hold the state."""

from collections.abc import Callable
import dataclasses
import pathlib

import orbax.checkpoint as ocp


@dataclasses.dataclass
class _Commit:  # orbax would look for futures in a tuple.
  """A future of orbax, of a call that blocks until the state is written."""

  wait: Callable[[], None]

  def result(self, timeout: float | None = None):
    """Blocks until the state is written."""
    del timeout  # orbax gives hours.
    self.wait()


class _Handler(ocp.AsyncCheckpointHandler):
  """Has the state written into its folder, which orbax makes and completes."""

  async def async_save(self, directory, args: 'Save'):
    """Returns what blocks until all is written."""
    return [_Commit(args.start_writing(pathlib.Path(directory)))]

  def save(self, directory, args: 'Save'):
    """Writes and waits."""
    args.start_writing(pathlib.Path(directory))()

  def restore(self, directory, args=None):
    """Refuses: every process reads its part alone (`saved_state`)."""
    raise NotImplementedError(f'{directory} is read by `SavedState`.')


@ocp.args.register_with_handler(_Handler, for_save=True, for_restore=True)
class Save(ocp.args.CheckpointArgs):
  """Argument of orbax to save the item.

  Attributes:
    start_writing: as `Runtime.start_writing`.
  """

  def __init__(self, start_writing: Callable[[pathlib.Path], Callable]):
    self.start_writing = start_writing
