"""Interrupts, kills and limits of time of runs in a sweep."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from rlinf_jax.sweep import process
from tests.rlinf_jax.sweep import fake_main

ROOT = pathlib.Path(__file__).resolve().parents[3]


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
  process = fake_main.launch(fake, *over, jobs=2)
  fake_main.wait_for('*/config.gin', 2)
  process.send_signal(how)
  _, errors = process.communicate(timeout=120)
  assert process.returncode == 130
  assert errors == 'Stopped. The same command continues the sweep.\n'
  for seed in (0, 1):
    assert os.path.exists(f'runs/clip_high=99,seed={seed}/interrupted')
  assert not os.path.exists('runs/clip_high=0.2,seed=0')

  process = fake_main.launch(fake, *over)
  process.communicate(timeout=120)
  assert process.returncode == 0
  assert '--resume' in fake_main.starts('clip_high=99,seed=0')[1]
  assert len(fake_main.read_csv()) == 4


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


@pytest.fixture
def interrupted_while_waiting(monkeypatch):
  """A process that is being stopped when Ctrl-C is pressed again."""

  class Waited:
    pid, returncode = 0, None

    def poll(self):
      return self.returncode

    def wait(self, timeout=None):
      if timeout is not None:
        raise KeyboardInterrupt
      return self.returncode

  waited = Waited()

  def kill(pid, number):
    if number == signal.SIGKILL:
      waited.returncode = -number

  monkeypatch.setattr(os, 'killpg', kill)
  return waited


def test_an_interrupt_while_a_run_is_stopped_ends_the_sweep(
  interrupted_while_waiting,
):
  with pytest.raises(KeyboardInterrupt):
    process.stop([interrupted_while_waiting])
  assert interrupted_while_waiting.returncode == -signal.SIGKILL


def test_a_run_that_outlives_a_killed_sweep_keeps_the_folder(fake):
  process = fake_main.launch(fake, 'workflows.grpo.clip_high = [99]')
  fake_main.wait_for('*/config.gin', 1)
  process.kill()
  process.communicate(timeout=120)
  try:
    with pytest.raises(ValueError, match='that outlived a killed sweep'):
      fake_main.run(fake, fake_main.HIGH)
  finally:
    os.kill(
      int(pathlib.Path('runs/clip_high=99/pid').read_text()), signal.SIGKILL
    )


@pytest.mark.parametrize('how', [signal.default_int_handler, signal.SIG_IGN])
def test_a_point_is_stopped_at_its_limit_and_continued(
  fake, capsys, monkeypatch, how
):
  over = 'workflows.grpo.clip_high = [99]'
  start = process.start

  def start_and_wait(*args, **kwargs):
    running = start(*args, **kwargs)
    fake_main.wait_for('*/config.gin', 1)
    return running._replace(start_time=time.monotonic())

  before = signal.signal(signal.SIGINT, how)
  with monkeypatch.context() as patch:
    patch.setattr(process, 'start', start_and_wait)
    try:
      assert fake_main.run(fake, over, minutes=0.01) == ['clip_high=99']
    finally:
      signal.signal(signal.SIGINT, before)
  out = capsys.readouterr().out
  assert 'its limit of 0.01 minutes; the same command continues it' in out
  assert os.path.exists('runs/clip_high=99/interrupted')
  assert fake_main.run(fake, over) == []
  assert '--resume' in fake_main.starts('clip_high=99')[1]
