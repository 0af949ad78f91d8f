"""Requests to stop, of which none is forgotten."""

import os
import signal
import subprocess
import sys
import types

import pytest

from rlinf_jax.run import console, interrupt, supervise
from rlinf_jax.runtime import base

BUSY = """if True:
  import concurrent.futures as c, os, signal, time
  from rlinf_jax.run import interrupt
  with c.ThreadPoolExecutor() as threads:
    stage = threads.submit(time.sleep, 60)
    with interrupt.handle_signals(interrupt.Interrupt()):
      for _ in range(2):
        os.kill(os.getpid(), signal.SIGTERM)
      stage.result()
"""


class Broken:
  """Standard output whose reader has ended."""

  def isatty(self):
    return False

  def write(self, text):
    raise BrokenPipeError


def test_a_reader_that_ends_does_not_end_the_run():
  out = console.create(10, stream=Broken())
  for step in range(1, 4):
    out.write(step, {'train/loss': 1.0})


def test_a_request_is_recorded_where_nobody_reads(monkeypatch):
  read, write = os.pipe()
  os.close(read)
  real, stop = os.write, interrupt.Interrupt()
  monkeypatch.setattr(os, 'write', lambda fd, text: real(write, text))
  stop(signal.SIGINT, None)
  assert stop.requested
  os.close(write)


def test_the_second_signal_does_not_wait_for_a_stage():
  done = subprocess.run(
    [sys.executable, '-c', BUSY], capture_output=True, text=True, timeout=50
  )
  assert done.returncode == 128 + signal.SIGTERM
  assert done.stderr.splitlines()[-1] == 'Stopped.'


def test_a_death_in_the_same_step_does_not_hide_a_request(monkeypatch):
  """A scheduler ends all processes of a job."""
  attempts, closed = [], []

  def attempt(run, stop, resume):
    attempts.append(resume)
    stop(signal.SIGTERM, None)
    raise base.ProcessDiedError('The process of place learner has died.')

  monkeypatch.setattr(supervise, '_attempt', attempt)
  run = types.SimpleNamespace(
    resume=False,
    checkpoints=types.SimpleNamespace(abandon=lambda: None, latest=lambda: 3),
    runtime=types.SimpleNamespace(close=lambda: closed.append(True)),
  )
  with pytest.raises(KeyboardInterrupt):
    supervise.run_to_end(run)
  assert attempts == [False] and closed == [True]
