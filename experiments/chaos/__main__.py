"""Disturbs small runs at random moments, and compares what comes of them.

  python -m experiments.chaos --trials 100 --workdir runs/chaos    # make chaos
  python -m experiments.chaos --first 1000 --trials 16 --workdir runs/chaos
  python -m experiments.chaos --first 2000 --trials 44 --workdir runs/chaos
  python -m experiments.chaos --table --workdir runs/chaos

The trials from 1,000 on have the runs with vLLM, and the clock that is set
forward; those from 2,000 on come in a given phase of a run. Each trial starts a
run, disturbs it, waits for its end, and continues it until it is finished.
Trials in `trials.jsonl` are not run again; the logs of those that are not as
they should be stay in the working folder. It needs Linux and the rights to
mount: it works in a mount namespace of its own, so that its disks and its
shared memory are seen by its processes alone.
"""

import argparse
import collections
from collections.abc import Iterator
import contextlib
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time
from typing import Any

import psutil

from experiments.chaos import faults, runs
from rlinf_jax.system import exit_watcher

LIMIT = 600.0  # Seconds that a run may take.
GONE = 30.0  # Seconds after which nothing of a run may be left.
# Logs that Ray keeps, and programs that torch compiled.
KEPT = 'ray', 'torchinductor_'
UNDISTURBED = 'after its end'  # The phase of a moment that came too late.
FIRST = 'words', 'processes', 'robots', 'simulators'  # Kinds up to there.
LATER = 1000  # The first trial of runs and faults that were added later.
AIMED = 2000  # The first trial that comes in a given phase,
PHASES = 'step', 'evaluation', 'checkpoint', 'export or later'
WITHIN = 0.5  # seconds of its beginning.
INSIDE = '--inside'  # The flag of the process in the namespace.


def started(
  command, mark, log, temporary, cache, clock=None
) -> subprocess.Popen:
  return subprocess.Popen(
    command,
    cwd=runs.ROOT,
    env=runs.environment(mark, temporary, cache) | (clock or {}),
    stdout=log,
    stderr=subprocess.STDOUT,
    start_new_session=True,
  )


def marked(mark: str) -> Iterator[psutil.Process]:
  """Yields the processes of a trial that live."""
  for one in psutil.process_iter():
    with contextlib.suppress(psutil.Error, OSError):
      alive = one.status() != psutil.STATUS_ZOMBIE
      if alive and one.environ().get(runs.MARK) == mark:
        yield one


def left(mark: str, temporary: pathlib.Path) -> dict[str, list[str]]:
  """Lists what remains of a run, at most `GONE` seconds after its end."""
  end = time.monotonic() + GONE
  while [*marked(mark)] and time.monotonic() < end:
    time.sleep(0.5)
  found = {
    'processes': [x.name() for x in marked(mark)],
    'shared memory': [x.name for x in pathlib.Path('/dev/shm').iterdir()],
    'temporary': [
      x.name for x in temporary.iterdir() if not x.name.startswith(KEPT)
    ],
  }
  for one in marked(mark):
    with contextlib.suppress(psutil.Error):
      one.kill()
  return {what: names[:5] for what, names in found.items() if names}


def reference(kind: str, folder: pathlib.Path, start) -> dict[str, Any]:
  """The metrics of an undisturbed run and its seconds; run once."""
  path = folder / f'{kind}.json'
  if not path.exists():
    run, cache = folder / 'reference' / kind, folder / 'cache'
    for _ in range(2):  # The second has its programs compiled.
      shutil.rmtree(run, ignore_errors=True)
      begun = time.monotonic()
      with (folder / f'{kind}.log').open('w') as log:
        command = runs.command(kind, run, start, False)
        started(command, kind, log, folder / 'tmp', cache).wait(timeout=LIMIT)
      seconds = time.monotonic() - begun
    content = {'seconds': seconds, 'metrics': runs.metrics(run)}
    if not any('eval' in key for key in content['metrics']):
      raise RuntimeError(
        f'The run {kind} did not end: see {folder}/{kind}.log.'
      )
    path.write_text(json.dumps(content))
  return json.loads(path.read_text())


def chosen(seed: int):
  """The kind of run, the fault and the phase of a trial, which never change.

  The phase is None for a trial that comes at any time.
  """
  n = len(FIRST)
  if seed < LATER:
    fault = faults.ALL[(seed // n + seed) % len(faults.ALL)]
    return FIRST[seed % n], fault, None
  if seed < AIMED:
    clocks = [(kind, faults.clock_forward) for kind in runs.KINDS]
    engines = [('vllm', fault) for fault in faults.ALL]
    pairs = [*clocks, *engines]
    return (*pairs[(seed - LATER) % len(pairs)], None)
  i = seed - AIMED
  # Each fault with each kind in 44 trials, and each kind in all phases in 16.
  phase = PHASES[(i + i // n) % len(PHASES)]
  return FIRST[i % n], faults.ALL[i % len(faults.ALL)], phase


def wait(process: subprocess.Popen, run: pathlib.Path, rng, seconds, phase):
  """Waits for the moment of a trial, or the end of the run.

  Args:
    process: of the run.
    run: its folder.
    rng: draws the moment.
    seconds: that an undisturbed run takes.
    phase: in which the moment is, soon after its beginning; None for any.
  """
  moment = rng.uniform(0, seconds if phase is None else WITHIN)
  if phase is not None:
    while process.poll() is None and runs.phase(run) != phase:
      time.sleep(0.01)
  with contextlib.suppress(subprocess.TimeoutExpired):
    process.wait(timeout=moment)


def trial(seed: int, folder: pathlib.Path) -> dict[str, Any]:
  """Runs, disturbs and continues a run; returns what came of it."""
  rng = random.Random(seed)
  kind, fault, phase = chosen(seed)
  start = runs.model(kind, folder)
  known = reference(kind, folder, start)
  mark, disk = f'{os.getpid()}-{seed}', folder / 'disk'
  run, temporary = disk / 'run', folder / 'tmp'
  log_path = folder / f'{seed}.log'
  shutil.rmtree(temporary, ignore_errors=True)
  faults.disk(disk)
  clock = faults.clock(disk) if fault is faults.clock_forward else {}
  result = {'seed': seed, 'kind': kind, 'fault': fault.__name__}
  try:
    with log_path.open('w') as log:
      command = runs.command(kind, run, start, False)
      cache = folder / 'cache'
      begun = time.monotonic()
      process = started(command, mark, log, temporary, cache, clock)
      wait(process, run, rng, known['seconds'], phase)
      result['moment'] = round(time.monotonic() - begun, 1)
      result['phase'] = runs.phase(run)
      if process.poll() is None:
        with contextlib.suppress(psutil.NoSuchProcess):
          fault(psutil.Process(process.pid), run, rng)
      else:
        result['phase'] = UNDISTURBED
      result['code'] = _end(process)
    result['left'] = left(mark, temporary)
    text = log_path.read_text()
    result['traceback'] = 'Traceback' in text
    result['told'] = exit_watcher.SENTENCE.partition('{')[0] in text
    result['last'] = text.strip().rpartition('\n')[-1][:300]
    faults.mend(run)
    for name in pathlib.Path('/dev/shm').iterdir():
      name.unlink()
    shutil.rmtree(temporary, ignore_errors=True)
    if result['code']:
      log_path = folder / f'{seed}.resumed.log'
      with log_path.open('w') as log:
        command = runs.command(kind, run, start, True)
        process = started(command, mark, log, temporary, folder / 'cache')
        result['resumed'] = _end(process)
      if result['resumed']:
        result['resumed_last'] = log_path.read_text().strip()[-600:]
      result['left_resumed'] = left(mark, temporary)
    result['same'] = runs.metrics(run) == known['metrics']
  finally:
    for one in marked(mark):
      with contextlib.suppress(psutil.Error):
        one.kill()
    subprocess.run(['umount', '--lazy', str(disk)], check=False)
  return result


def _end(process: subprocess.Popen) -> int | str:
  """The exit code of a process, or that it did not end."""
  try:
    return process.wait(timeout=LIMIT)
  except subprocess.TimeoutExpired:
    for one in faults.tree(psutil.Process(process.pid)):
      with contextlib.suppress(psutil.NoSuchProcess):
        one.kill()
    process.wait()
    return 'did not end'


def verdict(x: dict[str, Any]) -> str:
  """A trial in a word or two: 'as it should be', or what is not."""
  speaks = x['fault'] in [
    one.__name__ for one in (*faults.SPEAKS, faults.clock_forward)
  ]
  if x['code'] == 'did not end' or x.get('resumed') == 'did not end':
    return 'hangs'
  aborted = x['code'] in (-signal.SIGABRT, -signal.SIGSEGV)
  if aborted and not x.get('told'):
    return 'aborted'
  if x['traceback'] and speaks:
    return 'traceback'
  if x.get('resumed'):
    return 'not continued'
  if not x['same']:
    return 'other metrics'
  if (x['left'] or x.get('left_resumed')) and 'kill' not in x['fault']:
    return 'something left'
  if 'processes' in x['left']:
    return 'processes left'
  return 'as it should be'


def table(trials: list[dict[str, Any]]) -> Iterator[str]:
  """Yields the lines of a Markdown table of the runs that were disturbed."""
  trials = [x for x in trials if x['phase'] != UNDISTURBED]
  found = {name for x in trials for name in (x['kind'], x['fault'])}
  kinds = [kind for kind in runs.KINDS if kind in found]
  yield f'| fault | {" | ".join(kinds)} |'
  yield '|---' * (len(kinds) + 1) + '|'
  for fault in (*faults.ALL, faults.clock_forward):
    if fault.__name__ not in found:
      continue
    cells = []
    for kind in kinds:
      some = [
        verdict(x)
        for x in trials
        if (x['kind'], x['fault']) == (kind, fault.__name__)
      ]
      counts = collections.Counter(some)
      good = counts.pop('as it should be', 0)
      others = ''.join(f', {n} {what}' for what, n in counts.items())
      cells.append(f'{good} of {len(some)}{others}' if some else '—')
    yield f'| {fault.__name__.replace("_", " ")} | {" | ".join(cells)} |'


def main():
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--workdir', type=pathlib.Path, required=True)
  parser.add_argument('--trials', type=int, default=100)
  parser.add_argument('--first', type=int, default=0, help='of the trials')
  parser.add_argument('--table', action='store_true')
  parser.add_argument(INSIDE, action='store_true', help=argparse.SUPPRESS)
  args = parser.parse_args()
  folder = args.workdir.resolve()
  path = folder / 'trials.jsonl'
  folder.mkdir(parents=True, exist_ok=True)
  lines = path.read_text().splitlines() if path.exists() else []
  trials = [*map(json.loads, lines)]
  if args.table:
    print('\n'.join(table(trials)))
    return
  if not args.inside:
    inner = [sys.executable, '-m', 'experiments.chaos', *sys.argv[1:], INSIDE]
    mount = 'mount -t tmpfs chaos /dev/shm && exec "$0" "$@"'
    os.execvp('unshare', ['unshare', '--mount', 'sh', '-c', mount, *inner])
  # A shell's background jobs ignore interrupts, and their children would, too.
  signal.signal(signal.SIGINT, signal.default_int_handler)
  for seed in range(args.first, args.first + args.trials):
    if seed in [x['seed'] for x in trials]:
      continue
    found = trial(seed, folder)
    print(verdict(found), json.dumps(found), flush=True)
    if verdict(found) == 'as it should be':
      for log in folder.glob(f'{seed}.*log'):
        log.unlink()
    # Their last lines name folders of this machine.
    kept = {k: v for k, v in found.items() if not k.endswith('last')}
    trials.append(kept)
    with path.open('a') as file:
      print(json.dumps(kept), file=file)


if __name__ == '__main__':
  main()
