"""A run folder is used by one run at a time, and a dead one releases it."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

import core_only
from rlinf_jax.run_files import run_lock

ROOT = pathlib.Path(__file__).parents[3]
CHILD = """
import os, sys, time
from rlinf_jax.run_files import run_lock
try:
  with run_lock.hold(sys.argv[1]):
    exec(sys.argv[2])
    print('held', flush=True)
    sys.stdin.read()
except OSError as error:
  print(error, flush=True)
"""


@pytest.fixture
def child(tmp_path):
  """Starts processes that hold the lock until they are killed, if they can."""
  processes = []

  def start(code=''):
    process = subprocess.Popen(
      [sys.executable, '-S', '-c', CHILD, str(tmp_path / 'run'), code],
      cwd=ROOT,
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
    )
    processes.append(process)
    return process, process.stdout.readline().strip()

  yield start
  for process in processes:
    process.kill()
    process.communicate()


def test_a_second_run_is_told_who_uses_the_folder(child, tmp_path):
  first, line = child()
  assert line == 'held'
  second, line = child()
  assert second.wait(60) == 0
  assert re.fullmatch(
    rf'.*/run is in use by another run: process {first.pid} on '
    rf'{re.escape(os.uname().nodename)}. Wait until it ends, stop it, or '
    'choose another --workdir.',
    line,
  )
  # The refused process has removed nothing.
  assert (tmp_path / 'run' / run_lock.NAME).exists()


def test_a_killed_run_can_be_resumed_at_once(child):
  first, _ = child()
  first.kill()
  first.wait()
  assert child()[1] == 'held'


def test_a_process_holds_a_folder_as_often_as_it_likes(child, tmp_path):
  folder = tmp_path / 'run'
  with run_lock.hold(folder), run_lock.hold(folder):
    with run_lock.hold(folder / 'warm_start'):
      pass
    assert f'process {os.getpid()} on' in child()[1]
    (folder / 'config.gin').write_text('')
  assert child()[1] == 'held'


def test_children_do_not_keep_a_folder(child):
  first, line = child('if not os.fork(): sys.exit(time.sleep(5))')
  assert line == 'held'
  first.kill()  # Its child lives on.
  first.wait()
  assert child()[1] == 'held'


def test_a_new_folder_that_stays_empty_is_removed(tmp_path):
  with pytest.raises(ValueError), run_lock.hold(tmp_path / 'run'):
    raise ValueError
  assert not (tmp_path / 'run').exists()


@pytest.mark.slow
def test_a_second_command_on_a_folder_ends_with_a_sentence(tmp_path):
  folder = tmp_path / 'run'
  command = [sys.executable, '-m', 'rlinf_jax.main', '--resume']
  recipe = ['--gin_file', 'gin_configs/grpo_arithmetic.gin']
  with run_lock.hold(folder):
    done = subprocess.run(
      [*command, *recipe, '--workdir', str(folder)],
      cwd=ROOT,
      env=core_only.environment(),
      capture_output=True,
      text=True,
      timeout=120,
    )
    assert done.returncode == 1
    assert f'in use by another run: process {os.getpid()} on' in done.stderr
    assert 'Traceback' not in done.stderr
    # It has neither removed the folder nor made a model in it.
    assert [path.name for path in folder.iterdir()] == [run_lock.NAME]
