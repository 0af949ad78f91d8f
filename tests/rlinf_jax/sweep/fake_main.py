"""Sweeps whose points are a stand-in for a training run."""

import csv
import json
import os
import pathlib
import subprocess
import sys
import time

from rlinf_jax.sweep import sweep

ROOT = pathlib.Path(__file__).resolve().parents[3]


# Stands in for rlinf_jax.main: learns `high` + `seed`/100 + `step`/10, breaks
# at clip_high=13, never ends at clip_high=99, and counts its own starts.
FAKE = """
import json, os, pathlib, sys, time

values = {}
for flag in sys.argv[1:]:
  name, _, value = flag.partition('=')
  if name == '--gin_bindings':
    left, _, right = value.partition('=')
    values[left.strip()] = eval(right)
  elif name == '--workdir':
    folder = pathlib.Path(value)
folder.mkdir(parents=True, exist_ok=True)
with (folder / 'starts').open('a') as file:
  file.write(json.dumps(sys.argv[1:]) + '\\n')
(folder / 'pid').write_text(str(os.getpid()))
high = values['workflows.grpo.clip_high']
seed = values.get('train.train.seed', 0)
print('hello', high)
try:
  (folder / 'config.gin').touch()
  print('warming up', file=sys.stderr, flush=True)
  if high == 13 and '--resume' not in sys.argv:
    print('ValueError: 13 is unlucky.\\n', file=sys.stderr)
    sys.exit(3)
  if high == 14:
    sys.exit(0)
  time.sleep(600 if high == 99 and '--resume' not in sys.argv else 0)
except KeyboardInterrupt:
  (folder / 'interrupted').touch()
  raise
with (folder / 'metrics.jsonl').open('w') as file:
  for step in range(3):
    accuracy = high + seed / 100 + step / 10
    line = {'step': step, 'eval/accuracy': accuracy, 'train/loss': 'NaN'}
    file.write(json.dumps(line) + '\\n')
result = {'steps': 2, 'seconds': 7.5, 'metrics': line}
del line['step']
(folder / 'result.json').write_text(json.dumps(result))
"""


def run(fake, *over, **others):
  return sweep.sweep(
    ['some.gin'], ['STEPS = 2'], over, 'runs', command=fake, **others
  )


def starts(name):
  path = pathlib.Path('runs') / name / 'starts'
  return [json.loads(line) for line in path.read_text().splitlines()]


def read_csv():
  with open('runs/results.csv', newline='') as file:
    return list(csv.DictReader(file))


HIGH = 'workflows.grpo.clip_high = [0.2, 0.28]'


def launch(fake, *over, jobs=1):
  """Starts a sweep in another process, by its command line."""
  code = (
    'import signal\n'
    # nohup has it ignored.
    'signal.signal(signal.SIGHUP, signal.SIG_DFL)\n'
    'from absl import app\n'
    'from rlinf_jax.sweep import sweep\n'
    f"sweep.sweep.__kwdefaults__['command'] = {fake!r}\n"
    # The recipe of the fake runs is not there.
    'sweep.check.check = lambda *given: None\n'
    'app.run(sweep.main)\n'
  )
  return subprocess.Popen(
    [
      sys.executable,
      '-c',
      code,
      '--gin_file=some.gin',
      '--workdir=runs',
      *(f'--over={x}' for x in over),
      f'--jobs={jobs}',
    ],
    env={**os.environ, 'PYTHONPATH': str(ROOT)},
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )


def wait_for(pattern, count):
  end = time.monotonic() + 120
  while len(list(pathlib.Path('runs').glob(pattern))) < count:
    assert time.monotonic() < end, f'{pattern} did not appear'
    time.sleep(0.02)
