r"""Runs a recipe at every point of a grid of values, and compares the results.

  python -m rlinf_jax.sweep --gin_file gin_configs/grpo_arithmetic.gin \
    --over 'workflows.grpo.clip_high = [0.2, 0.28]' \
    --over 'train.train.seed = range(3)' --workdir runs/sweep

Each point is a process and a run folder, such as
runs/sweep/clip_high=0.2,seed=1. Values that no run would take are refused
before the first point starts.
The same command again skips finished points and continues interrupted ones.
Whenever a point finishes, its results are added: results.csv has one row per
point, results.md and a plot show means over seeds. logs/ has the output of each
point.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import fcntl
import functools
import json
import math
import pathlib
import signal
import sys
import time

from absl import flags

from rlinf_jax import command_line
from rlinf_jax.config import config, config_errors
from rlinf_jax.sweep import capacity, check, grid, process, results
from rlinf_jax.system import whole_file

_OVER = flags.DEFINE_multi_string(
  'over',
  [],
  "A parameter and its values, such as 'train.train.seed = range(3)'; the "
  'grid is the product of all --over.',
)
_JOBS = flags.DEFINE_integer(
  'jobs',
  None,
  'Points that run at the same time; by default as many as cores and memory '
  'allow.',
  lower_bound=1,
)
_POINT_MINUTES = flags.DEFINE_float(
  'point_minutes',
  math.inf,
  'Minutes after which a point is stopped; the same command continues it.',
  lower_bound=0.0,
)
flags.register_validator(
  _POINT_MINUTES, lambda minutes: minutes > 0, 'It must be a number above 0.'
)
_METRIC = flags.DEFINE_string(
  'metric', None, 'The metric to compare; by default accuracy or success.'
)
flags.adopt_module_key_flags(config)

_MAIN = (sys.executable, '-m', 'rlinf_jax.main')


def run(
  points: Sequence[grid.Point],
  start: Callable[[grid.Point], process.RunningPoint],
  may_start: Callable[[Sequence[process.RunningPoint]], bool],
  on_finish: Callable[[], None],
  limit: float = math.inf,
) -> list[str]:
  """Runs the unfinished points; stops all processes if it is interrupted.

  Args:
    points: of the grid.
    start: starts the process of a point.
    may_start: whether another may start beside the points that run.
    on_finish: called when a point has finished.
    limit: seconds after which a point is stopped, as if it had failed.

  Returns:
    Names of the points that failed.
  """
  numbers = {p.name: f'[{i}/{len(points)}]' for i, p in enumerate(points, 1)}
  waiting, running, failed = list(points), [], []
  try:
    while waiting or running:
      while waiting:
        point = waiting[0]
        if results.read_result(point) is not None:
          waiting.pop(0)
          _print(f'{numbers[point.name]} already finished {point.name}')
          continue
        if not may_start(running):
          break
        waiting.pop(0)
        verb = 'continued' if process.has_started(point) else 'started'
        running.append(start(point))
        _print(f'{numbers[point.name]} {verb} {point.name}')
      for job in [x for x in running if _has_ended(x, limit)]:
        running.remove(job)
        name, seconds = job.point.name, time.monotonic() - job.start_time
        failure = process.failure(job)
        if failure and seconds > limit:
          failure = (
            f': it was stopped at its limit of {limit / 60:g} minutes; the '
            'same command continues it'
          )
        _print(
          f'{numbers[name]} {"failed" if failure else "finished"} {name} after '
          f'{seconds:.0f} s{failure}'
        )
        failed.append(name) if failure else on_finish()
      time.sleep(0.05 if running else 0)
  finally:
    process.stop([job.process for job in running])
  return failed


def _has_ended(job: process.RunningPoint, limit: float) -> bool:
  """Whether the process of a point has ended; stops it after the limit."""
  if time.monotonic() - job.start_time > limit:
    process.stop([job.process])
  return job.process.poll() is not None


def sweep(
  gin_files: Sequence[str],
  gin_bindings: Sequence[str],
  over: Sequence[str],
  workdir: str,
  *,
  jobs: int | None = None,
  minutes: float = math.inf,
  metric: str | None = None,
  command: Sequence[str] = _MAIN,
) -> list[str]:
  """Runs the grid and writes its results.

  Args:
    gin_files: of the recipe.
    gin_bindings: of the recipe.
    over: parameters and their values, as `grid.parse_over` reads them.
    workdir: folder of the sweep.
    jobs: number of points that run at the same time; by default as many as
      cores and memory allow.
    minutes: after which a point is stopped; the next sweep continues it.
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
      process.start, command=[*command, *recipe], logs=logs, lock=lock
    )
    may_start = capacity.Capacity().may_start
    if jobs is not None:
      may_start = lambda running: len(running) < jobs

    def on_finish():
      try:
        results.write(points, folder, metric)
      except ValueError as error:  # Points that log the metric may follow.
        _print(str(error))

    failed = run(points, start_point, may_start, on_finish, 60 * minutes)
  if len(failed) < len(points):
    picture = results.write(points, folder, metric)
    table = results.mean_table(
      results.settings(points), metric or results.score(points)
    )
    results.print_table(*table)
    _print(f'The plot is in {picture}.')
  else:
    results.write_csv(points, folder / 'results.csv')
  _print(f'The results are in {folder / "results.csv"}, one row per point.')
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
    if not path.exists():
      raise ValueError(
        f'{folder} contains runs that are not of a sweep: choose another '
        '--workdir.'
      )
    earlier = json.loads(path.read_text())
    if earlier != recipe:
      raise ValueError(
        f'{folder} contains a sweep of another recipe ({" ".join(earlier)}). '
        'Use the same --gin_file and --gin_bindings, or another --workdir.'
      )
  else:
    whole_file.write_text(path, json.dumps(recipe))


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
    recipe = config.GIN_FILE.value, config.GIN_BINDINGS.value
    check.check(*recipe, grid.grid(_OVER.value, config.WORKDIR.value))
    failed = sweep(
      *recipe,
      _OVER.value,
      config.WORKDIR.value,
      jobs=_JOBS.value,
      minutes=_POINT_MINUTES.value,
      metric=_METRIC.value,
    )
  except command_line.USER_ERRORS as error:
    print(config_errors.text(error), file=sys.stderr)
    return 1
  except KeyboardInterrupt:
    print('Stopped. The same command continues the sweep.', file=sys.stderr)
    return 130
  if failed:
    print(f'Failed: {", ".join(failed)}.', file=sys.stderr)
  return 1 if failed else 0
