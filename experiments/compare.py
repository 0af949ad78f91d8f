"""Runs our benchmark and another system's in turn, and compares the results.

  python -m experiments.compare tunix --theirs_python PYTHON

Every run is a separate process. The order is ours, theirs, ours, theirs, …, so
that slow phases of the machine affect both. The script needs only the standard
library.
"""

import argparse
import json
import os
import pathlib
import platform
import random
import resource
import shlex
import shutil
import statistics
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent
# The recipe of our side, by the system that it is compared with.
RECIPES = {
  'tunix': 'gin_configs/bench/grpo_step.gin',
  'trl': 'experiments/compare_trl/ragged_step.gin',
}
REQUIRED = (
  'cpu_seconds_per_step',
  'wall_seconds_per_step',
  'first_step_seconds',
)
# Also compared if both sides print them.
OPTIONAL = ('first_step_cpu_seconds', 'peak_rss_mib')
MIN_PAIRS = 5


def last_json_object(text: str) -> dict:
  """Parses the last line of `text` that is a JSON object.

  Raises:
    ValueError: if there is no such line, or if it lacks a required figure.
  """
  for line in reversed(text.splitlines()):
    if not line.startswith('{'):
      continue
    try:
      figures = json.loads(line)
    except json.JSONDecodeError:
      continue
    missing = [name for name in REQUIRED if name not in figures]
    if missing:
      raise ValueError(f'The last JSON line lacks {", ".join(missing)}.')
    return figures
  raise ValueError('No line of the output is a JSON object.')


def environment() -> dict[str, str]:
  """The environment of this process, without settings of JAX and Python."""
  inherited = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith(('JAX_', 'XLA_', 'PYTHON'))
  }
  # Without a compilation cache: every process compiles.
  return inherited | {
    'JAX_PLATFORMS': 'cpu',
    'JAX_ENABLE_COMPILATION_CACHE': 'false',
  }


def busy_seconds() -> float:
  """CPU-seconds that all processes of the machine have used since boot."""
  with open('/proc/stat') as file:
    user, nice, system, _, _, irq, soft = file.readline().split()[1:8]
  ticks = sum(map(int, (user, nice, system, irq, soft)))
  return ticks / os.sysconf('SC_CLK_TCK')


def children_seconds() -> float:
  """CPU-seconds of this process's finished children."""
  usage = resource.getrusage(resource.RUSAGE_CHILDREN)
  return usage.ru_utime + usage.ru_stime


def run(command: list[str], timeout: float) -> dict:
  """Runs one side and returns its figures.

  Returns:
    The figures that the process prints; `seconds`, its wall time; and `others`,
    the mean number of cores that other processes kept busy meanwhile.

  Raises:
    RuntimeError: if the command fails or prints no figures.
  """
  busy, own, start = busy_seconds(), children_seconds(), time.perf_counter()
  done = subprocess.run(
    command,
    cwd=ROOT,
    env=environment(),
    capture_output=True,
    text=True,
    timeout=timeout,
  )
  seconds = time.perf_counter() - start
  others = busy_seconds() - busy - (children_seconds() - own)
  if done.returncode:
    raise RuntimeError(
      f'{shlex.join(command)} ended with exit code {done.returncode}:\n'
      + done.stderr[-2000:]
    )
  try:
    figures = last_json_object(done.stdout)
  except ValueError as error:
    raise RuntimeError(f'{shlex.join(command)}: {error}') from error
  return figures | {'seconds': seconds, 'others': max(others / seconds, 0.0)}


def interval_of_median(
  values: list[float], level: float = 0.95, draws: int = 10_000, seed: int = 0
) -> tuple[float, float]:
  """Percentile bootstrap interval of the median of `values`."""
  generator = random.Random(seed)
  medians = sorted(
    statistics.median(generator.choices(values, k=len(values)))
    for _ in range(draws)
  )
  tail = round(draws * (1 - level) / 2)
  return medians[tail], medians[-1 - tail]


def compare(pairs: list[dict]) -> dict[str, dict]:
  """Compares each figure: both medians, and the ratio theirs/ours in pairs."""
  names = REQUIRED + tuple(
    name
    for name in OPTIONAL
    if all(name in pair[side] for pair in pairs for side in pair)
  )
  result = {}
  for name in names:
    ratios = [pair['theirs'][name] / pair['ours'][name] for pair in pairs]
    low, high = interval_of_median(ratios)
    result[name] = {
      'ours': statistics.median(pair['ours'][name] for pair in pairs),
      'theirs': statistics.median(pair['theirs'][name] for pair in pairs),
      'ratios': ratios,
      'ratio': statistics.median(ratios),
      'interval': [low, high],
    }
  return result


def machine(cores: str | None) -> dict:
  """The machine on which the figures were measured."""
  with open('/proc/cpuinfo') as file:
    models = [
      line.split(':', 1)[1].strip()
      for line in file
      if line.startswith('model name')
    ]
  memory = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
  return {
    'cpu': models[0] if models else platform.processor(),
    'cores': len(os.sched_getaffinity(0)),
    'pinned_to': cores,
    'memory_gib': round(memory / 2**30, 1),
    'kernel': platform.release(),
  }


def table(result: dict) -> str:
  """The figures as a Markdown table."""
  where, system = result['machine'], result['system']
  cores = where['pinned_to']
  others = [pair[side]['others'] for pair in result['pairs'] for side in pair]
  lines = [
    f'{len(result["pairs"])} pairs on {where["cpu"]}, {where["cores"]} cores, '
    + (f'pinned to {cores}' if cores else 'not pinned')
    + '; other processes kept '
    f'{statistics.median(others):.2f} cores busy (at most {max(others):.2f}).',
    '',
    f'| figure (medians) | ours | {system} | {system} / ours | 95 % interval |',
    '| --- | ---: | ---: | ---: | ---: |',
  ]
  for name, row in result['figures'].items():
    low, high = row['interval']
    lines.append(
      f'| {name} | {row["ours"]:.2f} | {row["theirs"]:.2f} '
      f'| {row["ratio"]:.2f} | {low:.2f} – {high:.2f} |'
    )
  lines.append('')
  for name in REQUIRED:
    low = result['figures'][name]['interval'][0]
    lines.append(f'{name}: {system} needs at least {low:.2f} times ours.')
  return '\n'.join(lines)


def commands(arguments) -> dict[str, list[str]]:
  """The command of each side, by its name in the results."""
  pin = ['taskset', '-c', arguments.cores] if arguments.cores else []
  ours = [arguments.ours_python, '-m', 'experiments.bench']
  script = HERE / f'compare_{arguments.system}' / f'{arguments.system}_step.py'
  return {
    'ours': pin
    + ours
    + ['--gin_file', arguments.recipe or RECIPES[arguments.system]]
    + shlex.split(arguments.ours_arguments),
    'theirs': pin
    + [arguments.theirs_python, str(script)]
    + shlex.split(arguments.theirs_arguments),
  }


def parse(argv: list[str] | None):
  parser = argparse.ArgumentParser(description=__doc__)
  add = parser.add_argument
  add('system', choices=RECIPES, help='the other system')
  add('--recipe', help="gin file of our side; by default that of SYSTEM's job")
  add('--ours_python', default=sys.executable, help='Python with our packages')
  add(
    '--theirs_python',
    required=True,
    help='Python with the packages that compare_SYSTEM requires',
  )
  add('--pairs', type=int, default=7, help=f'at least {MIN_PAIRS}')
  add(
    '--warm_up_pairs',
    type=int,
    default=1,
    help='pairs that run first and are not counted',
  )
  add('--cores', help='cores for both, in the format of taskset -c')
  add(
    '--ours_arguments', default='', help='more arguments of experiments.bench'
  )
  add('--theirs_arguments', default='', help='more arguments of SYSTEM_step.py')
  add('--timeout', type=float, default=900, help='seconds per run')
  add(
    '--output',
    type=pathlib.Path,
    help='file of the results; by default compare_SYSTEM/results.json',
  )
  arguments = parser.parse_args(argv)
  if arguments.output is None:
    arguments.output = HERE / f'compare_{arguments.system}' / 'results.json'
  if arguments.pairs < MIN_PAIRS:
    parser.error(
      f'--pairs is {arguments.pairs}: a confidence interval needs at least '
      f'{MIN_PAIRS}.'
    )
  if arguments.cores and not shutil.which('taskset'):
    parser.error('--cores needs taskset (util-linux), which is not installed.')
  for name in ('ours_python', 'theirs_python'):
    if not shutil.which(getattr(arguments, name)):
      parser.error(
        f'--{name}: {getattr(arguments, name)} is not an executable.'
      )
    # A virtual environment's Python is a link: absolute, but not resolved.
    path = shutil.which(getattr(arguments, name))
    setattr(arguments, name, os.path.abspath(path))
  return arguments


def main(argv: list[str] | None = None) -> None:
  arguments = parse(argv)
  sides = commands(arguments)
  pairs = []
  for number in range(-arguments.warm_up_pairs, arguments.pairs):
    pair = {}
    for side, command in sides.items():
      pair[side] = run(command, arguments.timeout)
      line = ', '.join(f'{name} {pair[side][name]:.2f}' for name in REQUIRED)
      label = f'pair {number + 1}' if number >= 0 else 'warm-up'
      print(f'{label} {side}: {line}', file=sys.stderr, flush=True)
    if number >= 0:
      pairs.append(pair)
      # After each pair, so that a run that fails late loses none before it.
      result = {
        'machine': machine(arguments.cores),
        'system': arguments.system,
        'ours_arguments': arguments.ours_arguments,
        'theirs_arguments': arguments.theirs_arguments,
        'figures': compare(pairs),
        'pairs': pairs,
      }
      arguments.output.write_text(json.dumps(result, indent=2) + '\n')
  print(table(result))


if __name__ == '__main__':
  try:
    main()
  except (RuntimeError, subprocess.TimeoutExpired) as error:
    sys.exit(str(error))
