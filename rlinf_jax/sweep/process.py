"""The process that runs a point of a sweep."""

from collections.abc import Sequence
import os
import pathlib
import signal
import subprocess
import time
from typing import NamedTuple

from rlinf_jax.sweep import grid, results

# Seconds that an interrupted run has to write its checkpoint.
GRACE = 20.0


class RunningPoint(NamedTuple):
  """The process of a point.

  Attributes:
    point: of the grid.
    process: that runs it.
    start_time: by `time.monotonic`.
    errors: file of its standard error.
    offset: byte of that file at which the output of this process starts.
  """

  point: grid.Point
  process: subprocess.Popen
  start_time: float
  errors: pathlib.Path
  offset: int


def start(
  point: grid.Point,
  command: Sequence[str],
  logs: pathlib.Path,
  lock: int,
) -> RunningPoint:
  """Starts a point, or continues it where it was interrupted.

  Args:
    point: of the grid.
    command: the command line, without the arguments of the point.
    logs: folder for the output of the process.
    lock: file descriptor that the process inherits and so keeps open.
  """
  errors = logs / f'{point.name}.err'
  with (logs / f'{point.name}.out').open('a') as out, errors.open('a') as err:
    offset = err.tell()
    process = subprocess.Popen(
      [
        *command,
        *(f'--gin_bindings={x}' for x in grid.bindings(point)),
        f'--workdir={point.folder}',
        *(['--resume'] if has_started(point) else []),
      ],
      stdin=subprocess.DEVNULL,
      stdout=out,
      stderr=err,
      pass_fds=(lock,),
      # Ctrl-C reaches the sweep only, which interrupts each process once.
      start_new_session=True,
      preexec_fn=_hear_interrupts,
    )
  return RunningPoint(point, process, time.monotonic(), errors, offset)


def _hear_interrupts():
  """Lets the process hear an interrupt, also of a sweep that ignores it.

  A shell that starts a sweep in the background has it ignore interrupts.
  """
  signal.signal(signal.SIGINT, signal.SIG_DFL)


def has_started(point: grid.Point) -> bool:
  """Whether an earlier process has begun the run of a point."""
  return (point.folder / 'config.gin').exists()


def has_stepped(job: RunningPoint) -> bool:
  """Whether the process of a point has logged a metric."""
  start = time.time() - (time.monotonic() - job.start_time)
  try:
    return (job.point.folder / 'metrics.jsonl').stat().st_mtime >= start
  except FileNotFoundError:
    return False


def failure(job: RunningPoint) -> str:
  """Describes the failure of a process that has ended; '' for a success."""
  code = job.process.returncode
  if code == 0 and results.read_result(job.point) is not None:
    return ''
  with job.errors.open(errors='replace') as file:
    file.seek(job.offset)
    lines = [x.strip() for x in file.read().splitlines()]
  last_line = ([x for x in lines if x] or ['it printed no error'])[-1]
  if code == 0:
    reason = 'it wrote no result.json'
  else:
    reason = f'exit code {code}' if code > 0 else f'killed by signal {-code}'
  return f': {reason}: {last_line} (log: {job.errors})'


def stop(processes: Sequence[subprocess.Popen]) -> None:
  """Interrupts processes and their children; kills those that do not end.

  Raises:
    KeyboardInterrupt: if one comes meanwhile, after which all are killed.
  """
  alive = [process for process in processes if process.poll() is None]
  for process in alive:
    os.killpg(process.pid, signal.SIGINT)
  end = time.monotonic() + GRACE
  try:
    for process in alive:
      process.wait(max(0.0, end - time.monotonic()))
  except subprocess.TimeoutExpired:
    pass
  finally:
    for process in alive:
      if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
