"""A pool of simulators leaves nothing behind, however it ends."""

import functools
import gc
import os
import pathlib
import re
import subprocess
import sys
import time

import jax
import numpy as np
import psutil
import pytest

import claims
import in_memory
from planner.ir import flow as flow_lib
from planner.ir import plan as plan_lib
from rlinf_jax.envs import env_pool, gymnasium
from rlinf_jax.runtime import local
from stages import workflows
from stages.learn import optimizers
from stages.models.control import gaussian_policy

WHY = 'Gymnasium is not installed: pip install "rlinf-jax[gymnasium]"'
pytest.importorskip('gymnasium', reason=WHY)
TOY, HANG = 'env_toys:toys/Count-v0', 30


def there(pid):
  try:
    return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
  except psutil.NoSuchProcess:
    return False


def gone(pids, within=60.0):
  end = time.monotonic() + within
  while any(map(there, pids)) and time.monotonic() < end:
    time.sleep(0.02)
  return not any(map(there, pids))


def named_memory(pids):
  """The files of /dev/shm that processes map: other tests have some too."""
  maps = [pathlib.Path(f'/proc/{pid}/maps').read_text() for pid in pids]
  return set(re.findall(r'/dev/shm/\S+', ' '.join(maps)))


def test_a_pool_that_is_closed_or_forgotten_leaves_nothing():
  for end in ('close', 'forget'):
    pool = env_pool.make_pool(gymnasium.make, 4, 2, name=TOY)
    pool.init(np.arange(4))
    pids = pool.pids
    assert len(pids) == 2 and all(map(there, pids))
    if end == 'close':
      pool.close()
    del pool
    gc.collect()
    assert gone(pids)


def test_idle_processes_without_steps_exit():
  """As the process that begins a run for others does, or one that learns."""
  pool, other = (
    env_pool.make_pool(gymnasium.make, 4, 2, name=TOY, idle_timeout=rest)
    for rest in (0.2, 60.0)
  )
  token, _ = pool.init(np.arange(4))
  assert gone(pool.pids)
  there, _ = other.init(np.arange(4))
  for _ in range(2):
    token, timestep = pool.step(token, np.ones((4, 1)))
    there, want = other.step(there, np.ones((4, 1)))
    np.testing.assert_array_equal(timestep.obs, want.obs)
  assert not timestep.env_failed.any() and not gone(pool.pids, within=0.5)
  pool.close()
  other.close()


KILLED = f"""if True:
  import threading
  import numpy as np
  from rlinf_jax.envs import env_pool, gymnasium
  pool = env_pool.make_pool(gymnasium.make, 4, 2, name={TOY!r})
  token, _ = pool.init(np.arange(4))
  print(*pool.pids, flush=True)
  pool.step(token, np.full((4, 1), {HANG}))
"""


@pytest.mark.slow
def test_a_parent_that_is_killed_leaves_nothing():
  parent = subprocess.Popen(
    [sys.executable, '-c', KILLED],
    cwd=pathlib.Path(__file__).parent,
    env=os.environ | {'PYTHONPATH': os.pathsep.join(sys.path)},
    stdout=subprocess.PIPE,
    text=True,
  )
  pids = list(map(int, parent.stdout.readline().split()))
  assert len(pids) == 2 and all(map(there, pids))
  time.sleep(0.2)  # They hang.
  named = named_memory([parent.pid, *pids])
  parent.kill()
  parent.communicate()
  assert gone(pids)
  assert not any(pathlib.Path(name).exists() for name in named)


@pytest.mark.slow
@pytest.mark.parametrize('iterations', claims.some([200, 500], keep=[200]))
def test_memory_does_not_grow_in_hundreds_of_iterations(iterations):
  """Of PPO after the first hundred: simulators, policy, what is carried."""
  pool = env_pool.make_pool(gymnasium.make, 6, 2, name=TOY)
  workflow = workflows.embodied_ppo(
    env_pool.from_pool(pool),
    functools.partial(gaussian_policy.policy, width=8),
    optimizers.adamw(1e-3),
    num_envs=6,
    num_steps=2,
    num_minibatches=1,
    num_epochs=1,
  )
  key = jax.random.key(0)
  state = workflow.init(key)
  flow = flow_lib.trace(workflow.step, state, (), key)
  plan = plan_lib.parse({'pieces': 2}, flow.stages)
  runtime = local.LocalRuntime(plan, step=flow)
  in_memory.start(runtime, state)
  processes = [psutil.Process(), *map(psutil.Process, pool.pids)]
  sizes = []
  for i in range(100 + iterations):
    runtime.step((), jax.random.fold_in(key, i))
    runtime.timeline.take()
    if i in (99, 99 + iterations):
      gc.collect()
      sizes.append([one.memory_info().rss for one in processes])
  for early, late in zip(*sizes, strict=True):
    assert late <= 1.02 * early
  runtime.close()
  pool.close()
