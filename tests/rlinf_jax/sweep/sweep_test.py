"""A sweep runs every point once, survives what breaks, compares the rest."""

import csv
import fcntl
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

import core_only
from rlinf_jax.sweep import capacity, grid, process, results, sweep

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


@pytest.fixture
def fake(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(
    results, 'plot', lambda groups, metric, path: path.touch()
  )
  path = tmp_path / 'fake.py'
  path.write_text(FAKE)
  return sys.executable, '-S', str(path)


PLOT = results.plot


@pytest.fixture
def plotted(fake, monkeypatch):
  """The fake main; its results are plotted, which takes time."""
  monkeypatch.setattr(results, 'plot', PLOT)
  return fake


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
SEED = 'train.train.seed = range(3)'


def test_every_point_runs_once_with_its_values(fake, capsys):
  assert run(fake, HIGH, SEED) == []
  assert starts('clip_high=0.28,seed=1') == [
    [
      '--gin_file=some.gin',
      '--gin_bindings=STEPS = 2',
      '--gin_bindings=workflows.grpo.clip_high = 0.28',
      '--gin_bindings=train.train.seed = 1',
      '--workdir=runs/clip_high=0.28,seed=1',
    ]
  ]
  lines = capsys.readouterr().out.splitlines()
  assert lines[0] == '[1/6] started clip_high=0.2,seed=0'
  assert lines[1].startswith('[1/6] finished clip_high=0.2,seed=0 after ')
  assert lines[10] == '[6/6] started clip_high=0.28,seed=2'


def test_finished_points_are_skipped(fake, capsys):
  run(fake, HIGH)
  capsys.readouterr()
  assert run(fake, HIGH) == []
  assert len(starts('clip_high=0.2')) == 1
  assert capsys.readouterr().out.startswith(
    '[1/2] already finished clip_high=0.2\n'
    '[2/2] already finished clip_high=0.28\n'
  )


def test_a_grid_may_grow(fake):
  run(fake, HIGH)
  run(fake, 'workflows.grpo.clip_high = [0.2, 0.3]')
  assert len(starts('clip_high=0.2')) == 1
  assert [row['point'] for row in read_csv()] == [
    'clip_high=0.2',
    'clip_high=0.3',
  ]


def test_a_failed_point_is_reported_and_the_others_run(fake, capsys):
  failed = run(fake, 'workflows.grpo.clip_high = [0.2, 13, 14, 0.3]')
  assert failed == ['clip_high=13', 'clip_high=14']
  out = capsys.readouterr().out
  assert (
    ' s: exit code 3: ValueError: 13 is unlucky. '
    '(log: runs/logs/clip_high=13.err)\n'
  ) in out
  assert ' s: it wrote no result.json: warming up (log: ' in out
  assert '[4/4] finished clip_high=0.3' in out
  assert pathlib.Path('runs/logs/clip_high=13.out').read_text() == 'hello 13\n'
  rows = read_csv()
  assert rows[1]['workflows.grpo.clip_high'] == '13'
  assert rows[1]['eval/accuracy'] == '' != rows[3]['eval/accuracy']


def test_a_failed_point_is_continued_by_the_same_command(fake, capsys):
  run(fake, 'workflows.grpo.clip_high = [13]')
  assert 'results.csv' in capsys.readouterr().out
  assert run(fake, 'workflows.grpo.clip_high = [13]') == []
  assert ['--resume' in x for x in starts('clip_high=13')] == [False, True]
  assert '[1/1] continued clip_high=13\n' in capsys.readouterr().out


def test_only_the_output_of_the_last_attempt_is_quoted(fake, capsys):
  run(fake, 'workflows.grpo.clip_high = [13]')
  capsys.readouterr()
  silent = sys.executable, '-c', 'raise SystemExit(5)'
  run(silent, 'workflows.grpo.clip_high = [13]')
  out = capsys.readouterr().out
  assert 'exit code 5: it printed no error (log: ' in out


def test_a_killed_point_is_reported(fake, capsys):
  killer = (
    sys.executable,
    '-c',
    'import os; os.kill(os.getpid(), 9)',
  )
  assert run(killer, 'a.b = [1]') == ['b=1']
  assert 'killed by signal 9: it printed no error' in capsys.readouterr().out


@pytest.mark.parametrize('jobs', [1, 2, 3])
def test_no_more_than_jobs_points_run_at_a_time(fake, tmp_path, jobs):
  # Each stays until it has seen as many as may be there, or all have begun.
  counter = tmp_path / 'count.py'
  counter.write_text(
    'import os, pathlib, time\n'
    "here, all = pathlib.Path('here'), pathlib.Path('all')\n"
    'for folder in (here, all):\n'
    '  folder.mkdir(exist_ok=True)\n'
    '  (folder / str(os.getpid())).touch()\n'
    'end, count = time.monotonic() + 60, 0\n'
    f'while count < {jobs} and time.monotonic() < end:\n'
    '  count = len(list(here.iterdir()))\n'
    "  open('seen', 'a').write(f'{count}\\n')\n"
    '  if len(list(all.iterdir())) == 5: break\n'
    '  time.sleep(0.01)\n'
    'time.sleep(0.1)\n'
    '(here / str(os.getpid())).unlink()\n'
  )
  run((sys.executable, '-S', str(counter)), 'a.b = range(5)', jobs=jobs)
  running = [int(x) for x in pathlib.Path('seen').read_text().split()]
  assert max(running) == jobs


def test_points_of_another_recipe_are_not_mixed_in(fake):
  run(fake, HIGH)
  with pytest.raises(ValueError, match='contains a sweep of another recipe'):
    sweep.sweep(['some.gin'], [], [HIGH], 'runs', command=fake)


def test_a_recipe_that_never_started_may_be_corrected(fake):
  false = sys.executable, '-c', 'raise SystemExit(1)'
  sweep.sweep(['smoe.gin'], ['STEPS = 2'], [HIGH], 'runs', command=false)
  assert run(fake, HIGH) == []


def test_two_sweeps_do_not_share_a_folder(fake):
  os.mkdir('runs')
  with open('runs/lock', 'w') as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    with pytest.raises(ValueError, match='is in use by another sweep'):
      run(fake, HIGH)


def launch(fake, *over, jobs=1):
  """Starts a sweep in another process, by its command line."""
  code = (
    'import signal\n'
    # A shell that runs the tests in the background has SIGINT ignored, and
    # nohup has SIGHUP ignored.
    'signal.signal(signal.SIGINT, signal.default_int_handler)\n'
    'signal.signal(signal.SIGHUP, signal.SIG_DFL)\n'
    'from absl import app\n'
    'from rlinf_jax.sweep import sweep\n'
    f"sweep.sweep.__kwdefaults__['command'] = {fake!r}\n"
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


@pytest.mark.parametrize(
  'how',
  [
    signal.SIGINT,
    pytest.param(signal.SIGTERM, marks=pytest.mark.slow),
    pytest.param(signal.SIGHUP, marks=pytest.mark.slow),
  ],
)
def test_an_interrupted_sweep_stops_its_runs_and_can_continue(fake, how):
  over = 'workflows.grpo.clip_high = [99, 0.2]', 'train.train.seed = range(2)'
  process = launch(fake, *over, jobs=2)
  wait_for('*/config.gin', 2)
  process.send_signal(how)
  _, errors = process.communicate(timeout=120)
  assert process.returncode == 130
  assert errors == 'Stopped. The same command continues the sweep.\n'
  for seed in (0, 1):
    assert os.path.exists(f'runs/clip_high=99,seed={seed}/interrupted')
  assert not os.path.exists('runs/clip_high=0.2,seed=0')

  process = launch(fake, *over)
  process.communicate(timeout=120)
  assert process.returncode == 0
  assert '--resume' in starts('clip_high=99,seed=0')[1]
  assert len(read_csv()) == 4


def test_a_run_that_ignores_an_interrupt_is_killed(
  tmp_path, monkeypatch, capsys
):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(process, 'GRACE', 0.2)
  deaf = subprocess.Popen(
    [
      sys.executable,
      '-c',
      'import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN);'
      "print('ready', flush=True); time.sleep(600)",
    ],
    stdout=subprocess.PIPE,
    start_new_session=True,
  )
  deaf.stdout.readline()
  process.stop([deaf])
  deaf.stdout.close()
  assert deaf.returncode == -signal.SIGKILL


def test_a_run_that_outlives_a_killed_sweep_keeps_the_folder(fake):
  process = launch(fake, 'workflows.grpo.clip_high = [99]')
  wait_for('*/config.gin', 1)
  process.kill()
  process.communicate(timeout=120)
  try:
    with pytest.raises(ValueError, match='that outlived a killed sweep'):
      run(fake, HIGH)
  finally:
    os.kill(
      int(pathlib.Path('runs/clip_high=99/pid').read_text()), signal.SIGKILL
    )


@pytest.mark.parametrize(
  ('over', 'code', 'error'),
  [
    (['workflows.grpo.clip_high = [0.2, 13]'], 1, 'Failed: clip_high=13.\n'),
    (['workflows.grpo.clip_high = [0.2]'], 0, ''),
    (['workflows.grpo.clip_high = 0.2'], 1, 'should be a Python list such as'),
    ([], 1, 'A sweep needs --gin_file, --over and --workdir.\n'),
    ([HIGH, 'a.b', '[1]'], 1, 'is not a parameter and its values'),
  ],
)
def test_the_exit_code_is_zero_only_if_all_points_finish(
  fake, over, code, error
):
  process = launch(fake, *over)
  _, errors = process.communicate(timeout=120)
  assert process.returncode == code
  assert error in errors and errors.count('\n') == (1 if error else 0)


def test_results_are_written_and_shown_when_all_have_run(plotted, capsys):
  run(plotted, HIGH, SEED)
  assert len(read_csv()) == 6
  assert os.path.exists('runs/eval_accuracy.png')
  out = capsys.readouterr().out
  assert '0.410 ± 0.010' in out and 'runs/eval_accuracy.png' in out


def test_results_exist_after_the_first_point_and_grow(fake, monkeypatch):
  seen = []
  write = results.write

  def watch(*args):
    picture = write(*args)
    table = pathlib.Path('runs/results.md').read_text()
    finished = [row['point'] for row in read_csv() if row['seconds']]
    seen.append((len(finished), '0 of 1' in table, picture.exists()))
    return picture

  monkeypatch.setattr(results, 'write', watch)
  run(fake, 'workflows.grpo.clip_high = [0.2, 13, 0.28]', jobs=1)
  assert seen == [(1, True, True), (2, True, True), (2, True, True)]


def test_an_interrupted_sweep_has_the_results_of_finished_points(fake):
  process = launch(fake, 'workflows.grpo.clip_high = [0.2, 99]')
  wait_for('clip_high=99/config.gin', 1)
  process.send_signal(signal.SIGINT)
  process.communicate(timeout=120)
  assert [bool(row['seconds']) for row in read_csv()] == [True, False]


@pytest.mark.parametrize('how', [signal.default_int_handler, signal.SIG_IGN])
def test_a_point_is_stopped_at_its_limit_and_continued(
  fake, capsys, monkeypatch, how
):
  over = 'workflows.grpo.clip_high = [99]'
  start = process.start

  def start_and_wait(*args, **kwargs):
    running = start(*args, **kwargs)
    wait_for('*/config.gin', 1)
    return running._replace(start_time=time.monotonic())

  before = signal.signal(signal.SIGINT, how)
  with monkeypatch.context() as patch:
    patch.setattr(process, 'start', start_and_wait)
    try:
      assert run(fake, over, minutes=0.01) == ['clip_high=99']
    finally:
      signal.signal(signal.SIGINT, before)
  out = capsys.readouterr().out
  assert 'its limit of 0.01 minutes; the same command continues it' in out
  assert os.path.exists('runs/clip_high=99/interrupted')
  assert run(fake, over) == []
  assert '--resume' in starts('clip_high=99')[1]


def job(folder, stepped=True):
  """A running point, as far as its capacity is decided."""
  folder.mkdir()
  if stepped:
    (folder / 'metrics.jsonl').touch()
  point = grid.Point(folder.name, folder, {})
  return process.RunningPoint(
    point, None, time.monotonic() - 5, folder / 'err', 0
  )


@pytest.mark.parametrize(
  ('most', 'available', 'stepped', 'expected'),
  [
    (4, 100.0, True, True),
    (2, 100.0, True, False),  # As many run as the cores allow.
    (4, 100.0, False, False),  # The memory of the second is not known yet.
    (4, 18.4, True, False),
    (4, 18.6, True, True),
  ],
)
def test_cores_and_memory_limit_how_many_points_run(
  tmp_path, monkeypatch, most, available, stepped, expected
):
  monkeypatch.setattr(capacity, 'INTERVAL', 0.0)
  used = {'a': 10.0, 'b': 4.0}
  room = capacity.Capacity(
    most, lambda: available, lambda one: used[one.point.name]
  )
  running = [job(tmp_path / 'a'), job(tmp_path / 'b', stepped)]
  assert room.may_start([])
  # The smaller one may grow by 6, and a third may need 12.5.
  assert room.may_start(running) == expected


def test_memory_of_a_point_is_that_of_its_processes():
  code = (
    'import subprocess, sys\n'
    'x = bytearray(20_000_000)\n'
    "hold = 'x = bytearray(30_000_000); input()'\n"
    "subprocess.run([sys.executable, '-S', '-c', hold])\n"
  )
  parent = subprocess.Popen(
    [sys.executable, '-S', '-c', code], stdin=subprocess.PIPE
  )
  one = process.RunningPoint(None, parent, 0.0, None, 0)
  end = time.monotonic() + 60
  while capacity.used_memory(one) < 50e6:
    assert time.monotonic() < end
    time.sleep(0.02)
  parent.communicate(b'\n')
  assert capacity.used_memory(one) == 0
  assert capacity.available_memory() > 0


def test_a_metric_that_no_point_logged_is_refused_after_the_csv(plotted):
  with pytest.raises(ValueError, match='did you mean `eval/accuracy`'):
    run(plotted, HIGH, metric='eval/acuracy')
  assert len(read_csv()) == 2


TINY = (
  'STEPS = 2',
  'imitate/train.train.steps = 2',
  'imitate/train.train.plan = None',
  'arithmetic.examples.batch_size = 8',
  'arithmetic.problems.batch_size = 4',
  'warm_start.checkpoint.width = 32',
  'warm_start.checkpoint.layers = 1',
  'warm_start.checkpoint.feed_forward = 64',
  'arithmetic.problems.held_out = 16',
  'arithmetic.problems.held_out_batch = 16',
)


@pytest.mark.slow
@pytest.mark.skipif(
  not (ROOT / 'gin_configs/grpo_arithmetic.gin').exists()
  or not (ROOT / 'rlinf_jax/main.py').exists(),
  reason='needs rlinf_jax/main.py and gin_configs/grpo_arithmetic.gin',
)
def test_the_real_main_is_swept(tmp_path):
  process = subprocess.run(
    [
      sys.executable,
      '-m',
      'rlinf_jax.sweep',
      '--gin_file=gin_configs/grpo_arithmetic.gin',
      *(f'--gin_bindings={x}' for x in TINY),
      '--over=train.train.seed = range(2)',
      f'--workdir={tmp_path}/runs',
    ],
    env=core_only.environment(ROOT) | {'JAX_PLATFORMS': 'cpu'},
    cwd=tmp_path,
    capture_output=True,
    text=True,
  )
  assert process.returncode == 0, process.stdout + process.stderr
  for seed in (0, 1):
    assert (tmp_path / f'runs/seed={seed}/result.json').exists()
  assert (tmp_path / 'runs/eval_accuracy.png').exists()
