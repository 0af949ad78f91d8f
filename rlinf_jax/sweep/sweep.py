r"""Runs a recipe at every point of a grid of values, and compares the results.

  python -m rlinf_jax.sweep --gin_file gin_configs/grpo_arithmetic.gin \
    --over 'workflows.grpo.clip_high = [0.2, 0.28]' \
    --over 'train.train.seed = range(3)' --workdir runs/sweep --jobs 1

Each point is a process and a run folder, such as
runs/sweep/clip_high=0.2,seed=1.
The same command again skips finished points and continues interrupted ones.
Results are written to results.csv, one row per point; a table and a plot show
means over seeds; logs/ has the output of each point.
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
_JOBS = flags.DEFINE_integer(
  'jobs', 1, 'Points that run at the same time.', lower_bound=1
)
_METRIC = flags.DEFINE_string(
  'metric', None, 'The metric to compare; by default accuracy or success.'
)
flags.adopt_module_key_flags(config)

_MAIN = (sys.executable, '-m', 'rlinf_jax.main')
# Seconds that an interrupted run has to write its checkpoint.
_GRACE = 20.0


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


def run(
  points: Sequence[grid.Point],
  start: Callable[[grid.Point], RunningPoint],
  jobs: int,
) -> list[str]:
  """Runs the unfinished points; stops all processes if it is interrupted.

  Args:
    points: of the grid.
    start: starts the process of a point.
    jobs: number of points that run at the same time.

  Returns:
    Names of the points that failed.
  """
  numbers = {p.name: f'[{i}/{len(points)}]' for i, p in enumerate(points, 1)}
  waiting, running, failed = list(points), [], []
  try:
    while waiting or running:
      while waiting and len(running) < jobs:
        point = waiting.pop(0)
        if results.read_result(point) is not None:
          _print(f'{numbers[point.name]} already finished {point.name}')
          continue
        verb = 'continued' if _has_started(point) else 'started'
        running.append(start(point))
        _print(f'{numbers[point.name]} {verb} {point.name}')
      for job in [x for x in running if x.process.poll() is not None]:
        running.remove(job)
        name, failure = job.point.name, _failure(job)
        if failure:
          failed.append(name)
        _print(
          f'{numbers[name]} {"failed" if failure else "finished"} {name} after '
          f'{time.monotonic() - job.start_time:.0f} s{failure}'
        )
      time.sleep(0.05 if running else 0)
  finally:
    _stop([job.process for job in running])
  return failed


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
        *(f'--gin_bindings={k} = {v!r}' for k, v in point.values.items()),
        f'--workdir={point.folder}',
        *(['--resume'] if _has_started(point) else []),
      ],
      stdin=subprocess.DEVNULL,
      stdout=out,
      stderr=err,
      pass_fds=(lock,),
      # Ctrl-C reaches the sweep only, which interrupts each process once.
      start_new_session=True,
    )
  return RunningPoint(point, process, time.monotonic(), errors, offset)


def _has_started(point: grid.Point) -> bool:
  return (point.folder / 'config.gin').exists()


def _failure(job: RunningPoint) -> str:
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


def _stop(processes: Sequence[subprocess.Popen]) -> None:
  """Interrupts processes and their children; kills those that do not end."""
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
  """Runs the grid and writes its results.

  Args:
    gin_files: of the recipe.
    gin_bindings: of the recipe.
    over: parameters and their values, as `grid.parse_over` reads them.
    workdir: folder of the sweep.
    jobs: number of points that run at the same time.
    metric: the metric to compare; accuracy or success if None.
    command: the command that runs a point.

  Returns:
    Names of the points that failed.

  Raises:
    ValueError: if the grid cannot be read, the folder contains another sweep,
      or no point logged `metric`.
  """
  points = grid.grid(over, workdir)
  folder = pathlib.Path(workdir)
  logs = folder / 'logs'
  logs.mkdir(parents=True, exist_ok=True)
  recipe = [
    *(f'--gin_file={x}' for x in gin_files),
    *(f'--gin_bindings={x}' for x in gin_bindings),
  ]
  with _locked(folder) as lock:
    _check_recipe(folder, recipe)
    start_point = functools.partial(
      start, command=[*command, *recipe], logs=logs, lock=lock
    )
    failed = run(points, start_point, jobs)
  results.write_csv(points, folder / 'results.csv')
  _print(f'The results are in {folder / "results.csv"}, one row per point.')
  if len(failed) < len(points):
    metric = metric or results.score(points)
    groups = results.settings(points)
    results.print_table(*results.mean_table(groups, metric))
    picture = folder / f'{metric.replace("/", "_")}.png'
    results.plot(groups, metric, picture)
    _print(f'The plot is in {picture}.')
  return failed


@contextlib.contextmanager
def _locked(folder: pathlib.Path) -> Iterator[int]:
  """Locks a folder against other sweeps; yields the descriptor of the lock.

  Runs inherit the descriptor. The folder stays locked while a run outlives a
  sweep that was killed.
  """
  with (folder / 'lock').open('w') as file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
      raise ValueError(
        f'{folder} is in use by another sweep, or by a run that outlived a '
        'killed sweep: stop it, or choose another --workdir.'
      ) from error
    yield file.fileno()


def _check_recipe(folder: pathlib.Path, recipe: Sequence[str]) -> None:
  """Checks that earlier runs in the folder had the same recipe.

  Raises:
    ValueError: if they had another.
  """
  path = folder / 'sweep.json'
  if any(folder.glob('*/config.gin')):
    earlier = json.loads(path.read_text()) if path.exists() else []
    if earlier != recipe:
      raise ValueError(
        f'{folder} contains a sweep of another recipe ({" ".join(earlier)}). '
        'Use the same --gin_file and --gin_bindings, or another --workdir.'
      )
  else:
    path.write_text(json.dumps(recipe))


def _print(text: str) -> None:
  print(text, flush=True)


def main(argv: Sequence[str]) -> int:
  """Runs the sweep of the command line; returns the exit code."""
  for number in (signal.SIGTERM, signal.SIGHUP):
    if signal.getsignal(number) is not signal.SIG_IGN:  # Ignored under nohup.
      signal.signal(number, signal.default_int_handler)
  try:
    if len(argv) > 1:
      raise ValueError(
        f'{argv[1]} is not a flag. Put quotes around the whole argument of '
        '--over and of --gin_bindings.'
      )
    if not (config.GIN_FILE.value and _OVER.value and config.WORKDIR.value):
      raise ValueError('A sweep needs --gin_file, --over and --workdir.')
    failed = sweep(
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
    print('Stopped. The same command continues the sweep.', file=sys.stderr)
    return 130
  if failed:
    print(f'Failed: {", ".join(failed)}.', file=sys.stderr)
  return 1 if failed else 0
