"""Devices that several places share: one has them at a time, a dead one never.

Whoever has them holds a lock on a file, and so does whoever waits, on a file of
its own whose name says its rank and since when. The kernel lets go of the locks
of a process that ends, however it ends, so that nothing has to be found out
about it, and nothing is in the way of those who are left.
"""

from collections.abc import Callable, Iterable
import contextlib
import fcntl
import os
import pathlib
import threading
import time
import weakref

LOOKS = 0.001, 0.02  # Least and most seconds between those of who waits.
_all = weakref.WeakSet()
_thread = threading.local()


class Lease:
  """A place's right to devices that others have a right to as well.

  Of those who wait, who has the smallest rank is next; of those, who has waited
  longest. It serves one thread.

  Attributes:
    folder: where those meet who share.
    holder: who asks by it.
    rank: smaller goes first.
    on_release: called before the devices are released. A holder of device
      memory that the runtime does not know, such as an engine, frees it there.
  """

  def __init__(self, folder: str | os.PathLike, holder: str, rank: int):
    """Takes nothing yet.

    Args:
      folder: the same for all who share; on a disk of this machine.
      holder: for people.
      rank: among those who share.
    """
    self.folder = pathlib.Path(folder)
    self._line = self.folder / 'line'
    self._line.mkdir(parents=True, exist_ok=True)
    self.holder, self.rank = holder, rank
    self.on_release: list[Callable[[], None]] = []
    self._file, self._place = None, None  # Open files, locked.
    _all.add(self)

  @property
  def held(self) -> bool:
    return self._file is not None

  def acquire(
    self,
    seconds: float | None = None,
    failure: Callable[[], BaseException | None] = lambda: None,
  ):
    """Waits for its turn.

    Args:
      seconds: to wait at most.
      failure: asked again and again: why to wait no longer.

    Raises:
      TimeoutError: who has them, if that takes longer.
      BaseException: what has failed.
    """
    if self.held:
      raise RuntimeError(f'{self.holder} has taken the devices already.')
    began, mine = time.monotonic(), self._stand_in_line()
    try:
      while not (self._is_first(mine) and self._lock()):
        if error := failure():
          raise error
        waited = time.monotonic() - began
        if seconds is not None and waited > seconds:
          raise TimeoutError(
            f'{self.holder} has waited {seconds:g} s for devices that '
            f'{self.owner()} has: that place hangs, or takes longer than '
            '`receive_timeout` allows.'
          )
        # It is late by a hundredth of what it has waited.
        time.sleep(min(max(waited / 100, LOOKS[0]), LOOKS[1]))
    finally:
      (self._line / mine).unlink(missing_ok=True)
      self._place = _closed(self._place)

  def release(self):
    """Lets others have the devices; nothing if it has not got them."""
    if self.held:
      os.ftruncate(self._file, 0)
      self._file = _closed(self._file)

  def _stand_in_line(self) -> str:
    """A file that is locked before anybody can see it; its name."""
    mine = f'{self.rank:04d}-{time.monotonic_ns():020d}-{os.getpid()}'
    mine += f'-{threading.get_ident()}'
    fresh = self.folder / mine
    self._place = os.open(fresh, os.O_CREAT | os.O_RDWR)
    fcntl.flock(self._place, fcntl.LOCK_EX)
    fresh.rename(self._line / mine)
    return mine

  def _is_first(self, mine: str) -> bool:
    """Whether nobody who lives is before it."""
    for other in sorted(os.listdir(self._line)):
      if other == mine:
        return True
      if _is_locked(self._line / other):
        return False
      (self._line / other).unlink(missing_ok=True)  # Of one who died waiting.
    raise RuntimeError(
      f'The files in {self.folder}, by which devices are shared, were removed '
      'while they were in use.'
    )

  def _lock(self) -> bool:
    file = os.open(self.folder / 'held', os.O_CREAT | os.O_RDWR)
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      os.close(file)
      return False
    os.ftruncate(file, 0)
    os.write(file, f'{self.holder} (process {os.getpid()})'.encode())
    self._file = file
    return True

  def owner(self) -> str:
    """Who has the devices, for people."""
    with contextlib.suppress(FileNotFoundError):
      return (self.folder / 'held').read_text() or 'nobody'
    return 'nobody'

  def forget(self):
    """In a child of this process: what was taken is the parent's."""
    self._file, self._place = _closed(self._file), _closed(self._place)


def of_plan(plan, folder: str, places: Iterable[str]) -> dict[str, Lease]:
  """Leases of those of some places that share devices.

  Args:
    plan: says which, and who goes first.
    folder: where all processes of a run that share devices meet.
    places: of the plan.
  """
  leases = {}
  for name in places:
    if devices := plan.lease_devices(name):
      at = pathlib.Path(folder, '-'.join(map(str, devices)))
      leases[name] = Lease(
        at, f'Place {name!r}', plan.shared_devices.index(name)
      )
  return leases


def set_current(lease: Lease | None):
  """What this thread does it does by a lease."""
  _thread.lease = lease


def current() -> Lease | None:
  """The lease by which this thread has devices, if they are shared."""
  return getattr(_thread, 'lease', None)


def _is_locked(path: pathlib.Path) -> bool:
  """Whether whoever made a file still lives, and waits."""
  try:
    file = os.open(path, os.O_RDWR)
  except FileNotFoundError:
    return False
  try:
    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
  except BlockingIOError:
    return True
  finally:
    os.close(file)
  return False


def _closed(file: int | None) -> None:
  """Closes a file, which lets go of its lock."""
  if file is not None:
    os.close(file)


def _forget():
  # A lock lasts as long as anybody has its file open, children too.
  for lease in _all:
    lease.forget()


os.register_at_fork(after_in_child=_forget)
