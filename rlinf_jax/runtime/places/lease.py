"""Mutual exclusion for devices that several places share.

A place that holds the devices holds a file lock, and so does a place that
waits, on a file of its own in the queue. The kernel releases the locks of a
process that ends, however it ends. A dead process therefore loses its lock and
its position without being detected, and blocks no other.
"""

from collections.abc import Callable, Iterable
import contextlib
import fcntl
import os
import pathlib
import threading
import time
import weakref

POLL = 0.001, 0.02  # Least and most seconds between two tries to lock.
_leases = weakref.WeakSet()
_thread = threading.local()


class Lease:
  """A place's right to devices that it shares with other places.

  Of those that wait, the smallest rank is next; among equal ranks the one that
  has waited longest. One thread uses a lease.

  Attributes:
    folder: the same for all that share the devices.
    holder: who asks, for messages.
    rank: smaller goes first.
    on_release: functions called before the devices are released. An engine or
      another owner of device memory that the runtime does not manage frees it
      there.
  """

  def __init__(self, folder: str | os.PathLike, holder: str, rank: int):
    """Makes the folder; locks nothing.

    Args:
      folder: on a disk of this machine.
      holder: who asks, for messages.
      rank: among those that share.
    """
    self.folder = pathlib.Path(folder)
    self._queue = self.folder / 'queue'
    self._queue.mkdir(parents=True, exist_ok=True)
    self.holder, self.rank = holder, rank
    self.on_release: list[Callable[[], None]] = []
    self._lock, self._ticket = None, None  # Open files, locked.
    _leases.add(self)

  @property
  def held(self) -> bool:
    return self._lock is not None

  def acquire(
    self,
    seconds: float | None = None,
    failure: Callable[[], BaseException | None] = lambda: None,
  ):
    """Blocks until it holds the devices.

    Args:
      seconds: to wait at most; None for no limit.
      failure: polled while waiting; returns a reason to stop, or None.

    Raises:
      TimeoutError: if another holds them for longer; the message names it.
      BaseException: what `failure` returned.
    """
    if self.held:
      raise RuntimeError(f'{self.holder} holds the devices already.')
    start, ticket = time.monotonic(), self._enqueue()
    try:
      while not (self._is_first(ticket) and self._try_lock()):
        if error := failure():
          raise error
        waited = time.monotonic() - start
        if seconds is not None and waited > seconds:
          raise TimeoutError(
            f'{self.holder} waited {seconds:g} s for devices that '
            f'{self.owner()} holds: that place hangs, or takes longer than '
            '`receive_timeout` allows.'
          )
        # Polling costs at most a hundredth of the time waited.
        time.sleep(min(max(waited / 100, POLL[0]), POLL[1]))
    finally:
      (self._queue / ticket).unlink(missing_ok=True)
      self._ticket = _close(self._ticket)

  def release(self):
    """Releases the devices, if it holds them."""
    if self.held:
      os.ftruncate(self._lock, 0)
      self._lock = _close(self._lock)

  def _enqueue(self) -> str:
    """Takes a position in the queue; returns the name of its file.

    The file name sorts by rank, then by time.
    """
    ticket = f'{self.rank:04d}-{time.monotonic_ns():020d}-{os.getpid()}'
    ticket += f'-{threading.get_ident()}'
    # Lock it before it is visible: an unlocked file is taken for a dead one's.
    hidden = self.folder / ticket
    self._ticket = os.open(hidden, os.O_CREAT | os.O_RDWR)
    fcntl.flock(self._ticket, fcntl.LOCK_EX)
    hidden.rename(self._queue / ticket)
    return ticket

  def _is_first(self, ticket: str) -> bool:
    """Whether no live process is before it in the queue."""
    for other in sorted(os.listdir(self._queue)):
      if other == ticket:
        return True
      if _is_locked(self._queue / other):
        return False
      # Its process died while it waited.
      (self._queue / other).unlink(missing_ok=True)
    raise RuntimeError(
      f'The files in {self.folder}, by which devices are shared, were removed '
      'while they were in use.'
    )

  def _try_lock(self) -> bool:
    file = os.open(self.folder / 'held', os.O_CREAT | os.O_RDWR)
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      os.close(file)
      return False
    os.ftruncate(file, 0)
    os.write(file, f'{self.holder} (process {os.getpid()})'.encode())
    self._lock = file
    return True

  def owner(self) -> str:
    """The holder of the devices, for messages."""
    with contextlib.suppress(FileNotFoundError):
      return (self.folder / 'held').read_text() or 'no place'
    return 'no place'

  def close_files(self):
    """Closes its files, in a child process: the locks stay the parent's."""
    self._lock, self._ticket = _close(self._lock), _close(self._ticket)


def of_plan(plan, folder: str, places: Iterable[str]) -> dict[str, Lease]:
  """The leases of those of some places that share devices.

  Args:
    plan: says which share devices, and which goes first.
    folder: the same for all processes of a run that share devices.
    places: names of places of the plan.
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
  """Makes a lease the one under which this thread uses devices."""
  _thread.lease = lease


def current() -> Lease | None:
  """The lease under which this thread uses devices; None if it has none."""
  return getattr(_thread, 'lease', None)


def _is_locked(path: pathlib.Path) -> bool:
  """Whether the process that made a file is alive, and waits."""
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


def _close(file: int | None) -> None:
  """Closes a file, if there is one, which releases its lock; returns None."""
  if file is not None:
    os.close(file)


def _close_in_child():
  # A lock lasts as long as any process has its file open, children included.
  for lease in _leases:
    lease.close_files()


os.register_at_fork(after_in_child=_close_in_child)
