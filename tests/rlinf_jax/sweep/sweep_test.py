"""A sweep runs every point once, survives what breaks, compares the rest."""

import fcntl
import os
import pathlib
import signal
import subprocess
import sys

import pytest

import core_only
from rlinf_jax.sweep import capacity, results, sweep
from tests.rlinf_jax.sweep import fake_main

ROOT = pathlib.Path(__file__).resolve().parents[3]


PLOT = results.plot


@pytest.fixture
def plotted(fake, monkeypatch):
  """The fake main; its results are plotted, which takes time."""
  monkeypatch.setattr(results, 'plot', PLOT)
  return fake


SEED = 'train.train.seed = range(3)'


def test_every_point_runs_once_with_its_values(fake, capsys):
  assert fake_main.run(fake, fake_main.HIGH, SEED) == []
  assert fake_main.starts('clip_high=0.28,seed=1') == [
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
  fake_main.run(fake, fake_main.HIGH)
  capsys.readouterr()
  assert fake_main.run(fake, fake_main.HIGH) == []
  assert len(fake_main.starts('clip_high=0.2')) == 1
  assert capsys.readouterr().out.startswith(
    '[1/2] already finished clip_high=0.2\n'
    '[2/2] already finished clip_high=0.28\n'
  )


def test_finished_points_do_not_wait_for_room(fake, monkeypatch):
  fake_main.run(fake, fake_main.HIGH)
  asked = []

  def may_start(room, running):
    asked.append(len(running))
    return True

  monkeypatch.setattr(capacity.Capacity, 'may_start', may_start)
  over = 'workflows.grpo.clip_high = [0.2, 0.28, 0.3]'
  assert fake_main.run(fake, over) == [] and asked == [0]


def test_a_grid_may_grow(fake):
  fake_main.run(fake, fake_main.HIGH)
  fake_main.run(fake, 'workflows.grpo.clip_high = [0.2, 0.3]')
  assert len(fake_main.starts('clip_high=0.2')) == 1
  assert [row['point'] for row in fake_main.read_csv()] == [
    'clip_high=0.2',
    'clip_high=0.3',
  ]


def test_a_failed_point_is_reported_and_the_others_run(fake, capsys):
  failed = fake_main.run(fake, 'workflows.grpo.clip_high = [0.2, 13, 14, 0.3]')
  assert failed == ['clip_high=13', 'clip_high=14']
  out = capsys.readouterr().out
  assert (
    ' s: exit code 3: ValueError: 13 is unlucky. '
    '(log: runs/logs/clip_high=13.err)\n'
  ) in out
  assert ' s: it wrote no result.json: warming up (log: ' in out
  assert '[4/4] finished clip_high=0.3' in out
  assert pathlib.Path('runs/logs/clip_high=13.out').read_text() == 'hello 13\n'
  rows = fake_main.read_csv()
  assert rows[1]['workflows.grpo.clip_high'] == '13'
  assert rows[1]['eval/accuracy'] == '' != rows[3]['eval/accuracy']


def test_a_failed_point_is_continued_by_the_same_command(fake, capsys):
  fake_main.run(fake, 'workflows.grpo.clip_high = [13]')
  assert 'results.csv' in capsys.readouterr().out
  assert fake_main.run(fake, 'workflows.grpo.clip_high = [13]') == []
  assert ['--resume' in x for x in fake_main.starts('clip_high=13')] == [
    False,
    True,
  ]
  assert '[1/1] continued clip_high=13\n' in capsys.readouterr().out


def test_only_the_output_of_the_last_attempt_is_quoted(fake, capsys):
  fake_main.run(fake, 'workflows.grpo.clip_high = [13]')
  capsys.readouterr()
  silent = sys.executable, '-c', 'raise SystemExit(5)'
  fake_main.run(silent, 'workflows.grpo.clip_high = [13]')
  out = capsys.readouterr().out
  assert 'exit code 5: it printed no error (log: ' in out


def test_a_killed_point_is_reported(fake, capsys):
  killer = (
    sys.executable,
    '-c',
    'import os; os.kill(os.getpid(), 9)',
  )
  assert fake_main.run(killer, 'a.b = [1]') == ['b=1']
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
  fake_main.run(
    (sys.executable, '-S', str(counter)), 'a.b = range(5)', jobs=jobs
  )
  running = [int(x) for x in pathlib.Path('seen').read_text().split()]
  assert max(running) == jobs


def test_points_of_another_recipe_are_not_mixed_in(fake):
  fake_main.run(fake, fake_main.HIGH)
  with pytest.raises(ValueError, match='contains a sweep of another recipe'):
    sweep.sweep(['some.gin'], [], [fake_main.HIGH], 'runs', command=fake)


def test_runs_that_are_not_of_a_sweep_are_not_taken_for_one(fake):
  pathlib.Path('runs/mine').mkdir(parents=True)
  pathlib.Path('runs/mine/config.gin').touch()
  with pytest.raises(ValueError, match='contains runs that are not of a sweep'):
    fake_main.run(fake, fake_main.HIGH)


def test_a_recipe_that_never_started_may_be_corrected(fake):
  false = sys.executable, '-c', 'raise SystemExit(1)'
  sweep.sweep(
    ['smoe.gin'], ['STEPS = 2'], [fake_main.HIGH], 'runs', command=false
  )
  assert fake_main.run(fake, fake_main.HIGH) == []


def test_two_sweeps_do_not_share_a_folder(fake):
  os.mkdir('runs')
  with open('runs/lock', 'w') as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    with pytest.raises(ValueError, match='is in use by another sweep'):
      fake_main.run(fake, fake_main.HIGH)


@pytest.mark.parametrize(
  ('over', 'code', 'error'),
  [
    (['workflows.grpo.clip_high = [0.2, 13]'], 1, 'Failed: clip_high=13.\n'),
    (['workflows.grpo.clip_high = [0.2]'], 0, ''),
    (['workflows.grpo.clip_high = 0.2'], 1, 'should be a Python list such as'),
    ([], 1, 'A sweep needs --gin_file, --over and --workdir.\n'),
    ([fake_main.HIGH, 'a.b', '[1]'], 1, 'is not a parameter and its values'),
  ],
)
def test_the_exit_code_is_zero_only_if_all_points_finish(
  fake, over, code, error
):
  process = fake_main.launch(fake, *over)
  _, errors = process.communicate(timeout=120)
  assert process.returncode == code
  assert error in errors and errors.count('\n') == (1 if error else 0)


def test_results_are_written_and_shown_when_all_have_run(plotted, capsys):
  fake_main.run(plotted, fake_main.HIGH, SEED)
  assert len(fake_main.read_csv()) == 6
  assert os.path.exists('runs/eval_accuracy.png')
  out = capsys.readouterr().out
  assert '0.410 ± 0.010' in out and 'runs/eval_accuracy.png' in out


def test_results_exist_after_the_first_point_and_grow(fake, monkeypatch):
  seen = []
  write = results.write

  def watch(*args):
    picture = write(*args)
    table = pathlib.Path('runs/results.md').read_text()
    finished = [row['point'] for row in fake_main.read_csv() if row['seconds']]
    seen.append((len(finished), '0 of 1' in table, picture.exists()))
    return picture

  monkeypatch.setattr(results, 'write', watch)
  fake_main.run(fake, 'workflows.grpo.clip_high = [0.2, 13, 0.28]', jobs=1)
  assert seen == [(1, True, True), (2, True, True), (2, True, True)]


def test_an_interrupted_sweep_has_the_results_of_finished_points(fake):
  process = fake_main.launch(fake, 'workflows.grpo.clip_high = [0.2, 99]')
  fake_main.wait_for('clip_high=99/config.gin', 1)
  process.send_signal(signal.SIGINT)
  process.communicate(timeout=120)
  assert [bool(row['seconds']) for row in fake_main.read_csv()] == [True, False]


def test_a_metric_that_no_point_logged_is_refused_after_the_csv(plotted):
  with pytest.raises(ValueError, match='did you mean `eval/accuracy`'):
    fake_main.run(plotted, fake_main.HIGH, metric='eval/acuracy')
  assert len(fake_main.read_csv()) == 2


TINY = (
  'STEPS = 2',
  'UPDATES = 1',
  'EPOCHS = 1',
  'workflows.embodied_ppo.num_envs = 4',
  'workflows.embodied_ppo.num_steps = 2',
  'seed_source.seeds.held_out = 4',
  'seed_source.seeds.held_out_batch = 4',
)


@pytest.mark.slow
def test_the_real_main_is_swept(tmp_path):
  process = subprocess.run(
    [
      sys.executable,
      '-m',
      'rlinf_jax.sweep',
      '--gin_file=gin_configs/ppo_push.gin',
      *(f'--gin_bindings={x}' for x in TINY),
      '--over=train.train.seed = [1]',
      f'--workdir={tmp_path}/runs',
    ],
    env=core_only.environment(ROOT) | {'JAX_PLATFORMS': 'cpu'},
    cwd=tmp_path,
    capture_output=True,
    text=True,
  )
  assert process.returncode == 0, process.stdout + process.stderr
  assert (tmp_path / 'runs/seed=1/result.json').exists()
  assert (tmp_path / 'runs/eval_success_once.png').exists()
