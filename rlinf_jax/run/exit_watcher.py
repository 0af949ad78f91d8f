"""Says that a run was ended by a signal, which the run itself cannot say.

Libraries below Python abort their process where the system refuses them memory,
and the system kills the largest process when it has no memory left. Neither
leaves a word. A small process, which imports nothing of this package, therefore
waits for the end of the run's process, and prints a sentence if that end was
not announced.

  python -I -S exit_watcher.py PID    # as `watch` starts it
"""

from collections.abc import Iterator
import contextlib
import os
import pathlib
import signal
import subprocess
import sys

ENDED = b'ended'  # Announces an end that is not by a signal.
SECONDS = 5.0  # In which the watcher ends, once the run has.
SENTENCE = (
  'The process of the run was ended by {}. Libraries end it by SIGABRT where '
  'the system refuses them memory, and the system by SIGKILL where it has none '
  'left: in these cases, make batches smaller or free memory. Continue with '
  '--resume.'
)


@contextlib.contextmanager
def watch() -> Iterator[None]:
  """Prints a sentence if a signal ends this process within the context.

  It is printed to standard error. Where no process can be started, nothing
  is watched.
  """
  watcher = None
  with contextlib.suppress(OSError):
    watcher = subprocess.Popen(
      [sys.executable, '-I', '-S', __file__, str(os.getpid())],
      stdin=subprocess.PIPE,
      stdout=subprocess.DEVNULL,
      # So that Ctrl-C in a terminal, and signals to a group, do not end it.
      start_new_session=True,
    )
  owner = os.getpid()
  try:
    yield
  finally:
    if watcher and os.getpid() == owner:  # Not in a fork.
      with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        watcher.communicate(ENDED, timeout=SECONDS)


def _ending_signal(pid: int) -> str:
  """The name of the signal that has just ended a process."""
  try:
    # A zombie's last field is its status, as proc(5) says.
    status = pathlib.Path(f'/proc/{pid}/stat').read_text().split()[-1]
    return signal.Signals(int(status) & 0x7F).name
  except (OSError, ValueError):  # It is gone already, or not on Linux.
    return 'a signal'


def main(pid: int):
  """Waits until the process closes its end of the pipe."""
  if sys.stdin.buffer.read(len(ENDED)) != ENDED:
    print(SENTENCE.format(_ending_signal(pid)), file=sys.stderr, flush=True)


if __name__ == '__main__':
  main(int(sys.argv[1]))
