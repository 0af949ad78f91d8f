"""Reports on standard error that a run was killed or aborted, or stands still.

Libraries below Python abort their process where the system refuses them memory,
and the system kills the largest process when it has no memory left. Neither
prints a message. A watcher, a small process that imports nothing of this
package, holds the other end of a pipe of the run. If the pipe is closed before
`announce` has written to it, the watcher prints how the process ended. While it
is open, the watcher measures the processor time of the run and of all processes
that it started. A thread of a library that is refused memory can leave the
others waiting for it for ever, without a message.

  python -I -S exit_watcher.py PID SECONDS    # as `start` starts it
"""

import atexit
import contextlib
import os
import pathlib
import select
import signal
import subprocess
import sys
import time

ENDED = b'ended'  # Announces an end by Python's own means.
SECONDS = 5.0  # That `announce` waits for the watcher to end.
SENTENCE = (
  'The process ended in the middle, with {}. {} A training run continues with '
  '--resume.'
)
# Of signals by which other programs end a process.
ASKED = dict.fromkeys(
  ('SIGTERM', 'SIGHUP'),
  'A scheduler, `timeout` or a closed terminal asked it to end.',
)
MEMORY = (
  'Libraries end it by SIGABRT where the system refuses them memory, and the '
  'system by SIGKILL where it has none left: in these cases, make batches '
  'smaller or free memory.'
)
STILL = 600.0  # Seconds without work after which a run is reported.
LEAST = 1e-3  # Share of a processor that counts as work.
STANDS_STILL = (
  'The run has used no processor time for {:.0f} minutes: it waits, for '
  'another machine, a tool or a simulator, or it hangs. End it by Ctrl-C, or '
  'by kill -KILL {} if that does nothing; it continues with --resume.'
)
_watchers: list[subprocess.Popen] = []  # One at most.


def start():
  """Starts the watcher of this process, unless no process can be started.

  It prints nothing after an exception, `sys.exit` or `announce`.
  """
  with contextlib.suppress(OSError):
    watcher = subprocess.Popen(
      [
        *(sys.executable, '-I', '-S', __file__),
        *(str(os.getpid()), str(STILL)),
      ],
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


def _seconds(pid: int) -> float:
  """Processor time of a process and its descendants, ended ones included."""
  parents, used = {}, {}
  for path in pathlib.Path('/proc').glob('[0-9]*/stat'):
    with contextlib.suppress(OSError):
      # After the name, which may have spaces, come state, parent, …; proc(5).
      fields = path.read_text().rpartition(')')[2].split()
      parents[int(path.parent.name)] = int(fields[1])
      used[int(path.parent.name)] = sum(map(int, fields[11:15]))
  tree = {pid}
  while more := {one for one in parents if parents[one] in tree} - tree:
    tree |= more
  # This process itself is one of them, and is not the run's work.
  ticks = sum(used.get(one, 0) for one in tree - {os.getpid()})
  return ticks / os.sysconf('SC_CLK_TCK')


def main(pid: int, still: float):
  """Waits until the process closes its end of the pipe.

  Args:
    pid: of the process.
    still: seconds without work after which the process is reported, once until
      it works again.
  """
  used, since = _seconds(pid), time.monotonic()
  while not select.select([sys.stdin], [], [], still / 10)[0]:
    now = _seconds(pid)
    if abs(now - used) > LEAST * still:
      used, since = now, time.monotonic()
    elif since is not None and time.monotonic() - since >= still:
      since = None
      print(STANDS_STILL.format(still / 60, pid), file=sys.stderr, flush=True)
  if sys.stdin.buffer.read(len(ENDED)) != ENDED:
    status = _status(pid)
    text = SENTENCE.format(status, ASKED.get(status, MEMORY))
    print(text, file=sys.stderr, flush=True)


if __name__ == '__main__':
  main(int(sys.argv[1]), float(sys.argv[2]))
