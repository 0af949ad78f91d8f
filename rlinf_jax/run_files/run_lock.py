"""Mutual exclusion for run folders: one run at a time writes to each.

The run holds a file lock on `run.lock` in its folder. The kernel releases the
lock when the process ends, however it ends, so a run that crashed can be
resumed at once. Processes that only read a run folder take no lock, and neither
do the Ray processes of the run.
"""

from collections.abc import Iterator
import contextlib
import fcntl
import os
import pathlib
import socket

from rlinf_jax.system import notices

NAME = 'run.lock'
_held: dict[pathlib.Path, int] = {}  # Open and locked files, by folder.


@contextlib.contextmanager
def hold(folder: str | os.PathLike) -> Iterator[None]:
  """Holds the lock of a run folder, which is made if it does not exist.

  A folder that was made and is still empty at the end is removed. Within a
  process, holding the lock again has no effect.

  Raises:
    BlockingIOError: if another process holds it; the message names the process
      and its machine.
  """
  folder = pathlib.Path(folder).resolve()
  if folder in _held:
    yield
    return
  is_new = not folder.exists()
  _held[folder] = _lock(folder)
  try:
    yield
  finally:
    # A child process has closed its copy.
    if (file := _held.pop(folder, None)) is not None:
      os.ftruncate(file, 0)
      if is_new and folder.exists() and os.listdir(folder) == [NAME]:
        (folder / NAME).unlink()
        folder.rmdir()
      os.close(file)


def _lock(folder: pathlib.Path) -> int:
  """Opens and locks the file of a folder."""
  while True:
    folder.mkdir(parents=True, exist_ok=True)
    # A run that is refused removes its new folder, perhaps at this moment.
    with contextlib.suppress(FileNotFoundError):
      file = os.open(folder / NAME, os.O_CREAT | os.O_RDWR, 0o666)
      try:
        _lock_file(file, folder)
        if os.path.samestat(os.fstat(file), os.stat(folder / NAME)):
          break
      except BaseException:
        os.close(file)
        raise
      os.close(file)
  os.ftruncate(file, 0)
  os.write(file, f'process {os.getpid()} on {socket.gethostname()}'.encode())
  return file


def _lock_file(file: int, folder: pathlib.Path):
  try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError:
    owner = os.read(file, 1000).decode() or 'a process that is starting'
    raise BlockingIOError(
      f'{folder} is in use by another run: {owner}. Wait until it ends, stop '
      'it, or choose another --workdir.'
    ) from None
  except OSError as error:
    # Some network file systems have no locks; training must still be possible.
    notices.notify(
      f'{folder} cannot be locked ({error.strerror}): take care that no other '
      'run uses it.'
    )


def _close_in_child():
  # A lock lasts as long as any process has its file open, children included.
  while _held:
    os.close(_held.popitem()[1])


os.register_at_fork(after_in_child=_close_in_child)
