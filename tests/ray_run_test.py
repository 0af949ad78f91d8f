"""A run on processes of Ray, as its user meets it."""

import contextlib
import json
import os
import re
import signal
import subprocess
import time

import psutil
import pytest

import run_test

pytestmark = pytest.mark.slow

PLAN = (
  "train.train.plan = {'rows': {'gradient': 8}, 'places': {"
  "'actor': {'devices': [0]}, 'learner': {'devices': [1]}}, 'stages': {"
  "'repeat': 'actor', 'keys': 'actor', 'generate': 'actor', '*': 'learner'}}"
)
RAY = "train.train.ray = 'local'"

model = run_test.model  # The fixture.


def started(folder, model, *more, **environment):
  environment = os.environ | {'JAX_NUM_CPU_DEVICES': '2'} | environment
  return subprocess.Popen(
    run_test.command(folder, model, PLAN, *more),
    cwd=run_test.ROOT,
    env=environment,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )


def ended(process):
  out, error = process.communicate(timeout=400)
  assert process.returncode == 0, error
  return out


@pytest.fixture(scope='module')
def one(tmp_path_factory, model):
  """The same places in one process."""
  folder = tmp_path_factory.mktemp('one') / 'run'
  ended(started(folder, model))
  return folder


def assert_same(folder, other):
  assert run_test.lines(folder) == run_test.lines(other)
  run_test.equal_states(run_test.state(folder, 10), run_test.state(other, 10))


def test_processes_leave_the_folder_that_one_process_does(tmp_path, model, one):
  before = _raylets()
  out = ended(started(tmp_path / 'run', model, RAY))
  assert_same(tmp_path / 'run', one)
  assert re.search(r'actor → learner .*B (in calls|by shared memory)', out)
  text = (tmp_path / 'run' / 'metrics.jsonl').read_text()
  assert '"utilisation/learner"' in text
  time.sleep(2)
  assert not _raylets() - before


def test_processes_are_given_the_plan_that_a_run_finds(tmp_path, model, one):
  cache = {'RLINF_JAX_CACHE': str(tmp_path / 'cache')}
  auto = "train.train.plan = 'auto'"
  out = ended(started(tmp_path / 'run', model, RAY, auto, **cache))
  assert 'Plan: ' in out and 'a step, proved the fastest of its space' in out
  assert list((tmp_path / 'cache').iterdir())
  plan = json.loads((tmp_path / 'run' / 'plan.json').read_text())
  assert plan['places']
  pairs = zip(
    run_test.lines(tmp_path / 'run'), run_test.lines(one), strict=True
  )
  first, wanted = next(pairs)  # Later ones may part by what rounding drew.
  assert first.keys() == wanted.keys()
  for name, number in first.items():
    assert number == pytest.approx(wanted[name], abs=1e-4), name


def _raylets():
  """Processes of Ray on this machine."""
  there = psutil.process_iter(['name', 'pid'])
  return {p.info['pid'] for p in there if 'raylet' in p.info['name']}


def places(process):
  """Processes of the places of a run."""
  found = []
  for child in psutil.Process(process.pid).children(recursive=True):
    with contextlib.suppress(psutil.NoSuchProcess):
      if (child.cmdline() or [''])[0].startswith('ray::Actor'):
        found.append(child)
  return found


@pytest.mark.parametrize('after', [3, 7])
def test_a_run_of_which_a_process_is_killed_goes_on_by_itself(
  tmp_path, model, one, after
):
  folder = tmp_path / 'run'
  process = started(folder, model, RAY)
  deadline = time.time() + 300
  while not _reached(folder, after):
    assert process.poll() is None, process.communicate()
    assert time.time() < deadline
    time.sleep(0.01)
  victims = places(process)
  assert len(victims) == 2
  victims[after % 2].send_signal(signal.SIGKILL)
  out = ended(process)
  since = 0 if after < 5 else 5
  assert 'has died' in out and f'goes on from step {since}' in out
  assert_same(folder, one)


def _reached(folder, step):
  try:
    return any(line['step'] >= step for line in run_test.lines(folder))
  except (OSError, ValueError):  # Not there yet, or half a line.
    return False
