"""Reports on standard error that the process of a run was killed or aborted.

Libraries below Python abort their process where the system refuses them memory,
and the system kills the largest process when it has no memory left. Neither
prints a message. A watcher, a small process that imports nothing of this
package, holds the other end of a pipe of the run. If the pipe is closed before
`announce` has written to it, the watcher prints how the process ended.

  python -I -S exit_watcher.py PID    # as `start` starts it
"""

import atexit
import contextlib
import os
import pathlib
import signal
import subprocess
import sys

ENDED = b'ended'  # Announces an end by Python's own means.
SECONDS = 5.0  # That `announce` waits for the watcher to end.
SENTENCE = (
  'The process ended in the middle, with {}. Libraries end it by SIGABRT '
  'where the system refuses them memory, and the system by SIGKILL where it '
  'has none left: in these cases, make batches smaller or free memory. A '
  'training run continues with --resume.'
)
_watchers: list[subprocess.Popen] = []  # One at most.


def start():
  """Starts the watcher of this process, unless no process can be started.

  It prints nothing after an exception, `sys.exit` or `announce`.
  """
  with contextlib.suppress(OSError):
    watcher = subprocess.Popen(
      [sys.executable, '-I', '-S', __file__, str(os.getpid())],
      stdin=subprocess.PIPE,
      stdout=subprocess.DEVNULL,
      # So that Ctrl-C in a terminal, and signals to a group, do not end it.
      start_new_session=True,
    )
    _watchers.append(watcher)
    atexit.register(announce)
    # A fork has the same pipe, and its end is not that of the run.
    os.register_at_fork(after_in_child=_watchers.clear)


def announce():
  """Ends the watcher: the end that comes now is an orderly one."""
  while _watchers:
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
      _watchers.pop().communicate(ENDED, timeout=SECONDS)


def _status(pid: int) -> str:
  """Describes how a process has ended, by its entry in /proc."""
  try:
    # A zombie's last field is its status, as proc(5) says.
    status = int(pathlib.Path(f'/proc/{pid}/stat').read_text().split()[-1])
  except OSError:  # It is gone already, or this is not Linux.
    return 'a signal or an exit code'
  number = status & 0x7F
  if not number:
    return f'exit code {status >> 8}'
  known = {x.value: x.name for x in signal.Signals}
  return known.get(
    number, f'signal {number}'
  )  # Real-time signals have no name.


def main(pid: int):
  """Waits until the process closes its end of the pipe."""
  if sys.stdin.buffer.read(len(ENDED)) != ENDED:
    print(SENTENCE.format(_status(pid)), file=sys.stderr, flush=True)


if __name__ == '__main__':
  main(int(sys.argv[1]))
