r"""Runs a recipe at every point of a grid, and compares the outcomes.

  python -m rlinf_jax.sweep --gin_file gin_configs/grpo_arithmetic.gin \
    --over 'workflows.grpo.clip_high = [0.2, 0.28]' \
    --over 'train.train.seed = range(3)' --workdir runs/sweep --jobs 1

Each point is a process and a run folder, such as
runs/sweep/clip_high=0.2,seed=1.
The same command again skips the points that are done and continues those that
were interrupted. What comes out: results.csv (a row a point), a table and a
plot of means over seeds, and of each point what it printed, in logs/.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import fcntl
import functools
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from typing import NamedTuple

from absl import flags

from rlinf_jax import config
from rlinf_jax.sweep import grid, results

_OVER = flags.DEFINE_multi_string(
  'over',
  [],
  "A parameter and its values, such as 'train.train.seed = range(3)'; the "
  'grid is the product of all --over.',
)
_JOBS = flags.DEFINE_integer('jobs', 1, 'Points run at a time.', lower_bound=1)
_METRIC = flags.DEFINE_string(
  'metric', None, 'What to compare; what evaluations are summed up by if unset.'
)
flags.adopt_module_key_flags(config)

_MAIN = (sys.executable, '-m', 'rlinf_jax.main')
# Seconds that an interrupted run has to write what it wants to write.
_GRACE = 20.0


class Job(NamedTuple):
  """A point's process; what it prints to `errors` begins at byte `offset`."""

  point: grid.Point
  process: subprocess.Popen
  began: float
  errors: pathlib.Path
  offset: int


def run(
  points: Sequence[grid.Point],
  start: Callable[[grid.Point], Job],
  jobs: int,
) -> list[str]:
  """Runs what is not done, `jobs` at a time, and names the points that broke.

  However it ends, no process is left.
  """
  numbers = {p.name: f'[{i}/{len(points)}]' for i, p in enumerate(points, 1)}
  waiting, running, broken = list(points), [], []
  try:
    while waiting or running:
      while waiting and len(running) < jobs:
        point = waiting.pop(0)
        if results.last(point) is not None:
          _say(f'{numbers[point.name]} was done {point.name}')
          continue
        again = 'continued' if _has_begun(point) else 'started'
        running.append(start(point))
        _say(f'{numbers[point.name]} {again} {point.name}')
      for job in [x for x in running if x.process.poll() is not None]:
        running.remove(job)
        name, fault = job.point.name, _fault(job)
        if fault:
          broken.append(name)
        _say(
          f'{numbers[name]} {"broke" if fault else "finished"} {name} after '
          f'{time.monotonic() - job.began:.0f} s{fault}'
        )
      time.sleep(0.05 if running else 0)
  finally:
    _stop([job.process for job in running])
  return broken


def start(
  point: grid.Point,
  command: Sequence[str],
  logs: pathlib.Path,
  lock: int,
) -> Job:
  """Starts a point, or continues it where it was interrupted.

  Args:
    point: which.
    command: what to run, without what is the point's own.
    logs: folder for what it prints.
    lock: file that the process keeps open.
  """
  errors = logs / f'{point.name}.err'
  with (logs / f'{point.name}.out').open('a') as out, errors.open('a') as err:
    offset = err.tell()
    process = subprocess.Popen(
      [
        *command,
        *(f'--gin_bindings={k} = {v!r}' for k, v in point.values.items()),
        f'--workdir={point.folder}',
        *(['--resume'] if _has_begun(point) else []),
      ],
      stdin=subprocess.DEVNULL,
      stdout=out,
      stderr=err,
      pass_fds=(lock,),
      # Ctrl-C reaches the sweep alone, which passes it on once.
      start_new_session=True,
    )
  return Job(point, process, time.monotonic(), errors, offset)


def _has_begun(point: grid.Point) -> bool:
  return (point.folder / 'config.gin').exists()


def _fault(job: Job) -> str:
  """What went wrong in a process that has ended; '' if nothing."""
  code = job.process.returncode
  if code == 0 and results.last(job.point) is not None:
    return ''
  with job.errors.open(errors='replace') as file:
    file.seek(job.offset)
    lines = [x.strip() for x in file.read().splitlines()]
  last = ([x for x in lines if x] or ['it printed no error'])[-1]
  if code == 0:
    how = 'it left no result.json'
  else:
    how = f'exit code {code}' if code > 0 else f'killed by signal {-code}'
  return f': {how}: {last} (log: {job.errors})'


def _stop(processes: Sequence[subprocess.Popen]) -> None:
  """Interrupts each with all it started; kills what stays for too long."""
  alive = [process for process in processes if process.poll() is None]
  for process in alive:
    os.killpg(process.pid, signal.SIGINT)
  end = time.monotonic() + _GRACE
  try:
    for process in alive:
      process.wait(max(0.0, end - time.monotonic()))
  except (KeyboardInterrupt, subprocess.TimeoutExpired):
    for process in alive:
      if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def sweep(
  gin_files: Sequence[str],
  gin_bindings: Sequence[str],
  over: Sequence[str],
  workdir: str,
  *,
  jobs: int = 1,
  metric: str | None = None,
  command: Sequence[str] = _MAIN,
) -> list[str]:
  """Runs the grid and writes what came out; names the points that broke.

  Raises:
    ValueError: a sentence; the grid cannot be read, the folder holds another
      sweep, or no point logged `metric`.
  """
  points = grid.grid(over, workdir)
  folder = pathlib.Path(workdir)
  logs = folder / 'logs'
  logs.mkdir(parents=True, exist_ok=True)
  recipe = [
    *(f'--gin_file={x}' for x in gin_files),
    *(f'--gin_bindings={x}' for x in gin_bindings),
  ]
  with _claimed(folder) as lock:
    _remember(folder, recipe)
    begin = functools.partial(
      start, command=[*command, *recipe], logs=logs, lock=lock
    )
    broken = run(points, begin, jobs)
  results.write_csv(points, folder / 'results.csv')
  _say(f'A row a point is in {folder / "results.csv"}.')
  if len(broken) < len(points):
    metric = metric or results.score(points)
    groups = results.settings(points)
    results.print_table(*results.summarize(groups, metric))
    picture = folder / f'{metric.replace("/", "_")}.png'
    results.plot(groups, metric, picture)
    _say(f'The curves are in {picture}.')
  return broken


@contextlib.contextmanager
def _claimed(folder: pathlib.Path) -> Iterator[int]:
  """Keeps other sweeps out of `folder`.

  The lock is the open file's: a run that holds it open keeps it, should it
  outlive a sweep that was killed.
  """
  with (folder / 'lock').open('w') as file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
      raise ValueError(
        f'{folder} is in use by another sweep, or by a run that a killed sweep '
        'left behind; end it, or give another --workdir.'
      ) from error
    yield file.fileno()


def _remember(folder: pathlib.Path, recipe: Sequence[str]) -> None:
  """Refuses to mix runs of another recipe with those that are there."""
  path = folder / 'sweep.json'
  if any(folder.glob('*/config.gin')):
    before = json.loads(path.read_text()) if path.exists() else []
    if before != recipe:
      raise ValueError(
        f'{folder} holds a sweep of another recipe ({" ".join(before)}); give '
        'the same --gin_file and --gin_bindings, or another --workdir.'
      )
  else:
    path.write_text(json.dumps(recipe))


def _say(text: str) -> None:
  print(text, flush=True)


def main(argv: Sequence[str]) -> int:
  for end in (signal.SIGTERM, signal.SIGHUP):
    if signal.getsignal(end) is not signal.SIG_IGN:  # As it is under nohup.
      signal.signal(end, signal.default_int_handler)
  try:
    if len(argv) > 1:
      raise ValueError(
        f'{argv[1]} is no flag; put quotes around a whole --over or '
        '--gin_bindings.'
      )
    if not (config.GIN_FILE.value and _OVER.value and config.WORKDIR.value):
      raise ValueError('A sweep needs --gin_file, --over and --workdir.')
    broken = sweep(
      config.GIN_FILE.value,
      config.GIN_BINDINGS.value,
      _OVER.value,
      config.WORKDIR.value,
      jobs=_JOBS.value,
      metric=_METRIC.value,
    )
  except (OSError, ValueError) as error:
    print(error, file=sys.stderr)
    return 1
  except KeyboardInterrupt:
    print('Stopped; the same command again goes on from here.', file=sys.stderr)
    return 130
  if broken:
    print(f'Broken: {", ".join(broken)}.', file=sys.stderr)
  return 1 if broken else 0
