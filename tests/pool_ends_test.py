"""What a pool of simulators leaves behind: nothing, however it ends."""

import gc
import os
import pathlib
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest

from rlinf_jax.worlds import gymnasium, hosted

WHY = 'Gymnasium is not installed: pip install "rlinf-jax[gymnasium]"'
pytest.importorskip('gymnasium', reason=WHY)
TOY, HANG = 'worlds_toys:toys/Count-v0', 30


def there(pid):
  try:
    return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
  except psutil.NoSuchProcess:
    return False


def gone(pids, within=5.0):
  end = time.monotonic() + within
  while any(map(there, pids)) and time.monotonic() < end:
    time.sleep(0.02)
  return not any(map(there, pids))


def shared():
  return {path.name for path in pathlib.Path('/dev/shm').iterdir()}


def test_a_pool_that_is_closed_or_forgotten_leaves_nothing():
  for end in ('close', 'forget'):
    pool = hosted.pool(gymnasium.make, 4, 2, name=TOY)
    pool.init(np.arange(4))
    pids = pool.pids
    assert len(pids) == 2 and all(map(there, pids))
    if end == 'close':
      pool.close()
    del pool
    gc.collect()
    assert gone(pids)


KILLED = f"""if True:
  import threading
  import numpy as np
  from rlinf_jax.worlds import gymnasium, hosted
  pool = hosted.pool(gymnasium.make, 4, 2, name={TOY!r})
  token, _ = pool.init(np.arange(4))
  print(*pool.pids, flush=True)
  pool.step(token, np.full((4, 1), {HANG}))
"""


@pytest.mark.slow
def test_a_parent_that_is_killed_leaves_nothing():
  before = shared()
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
  parent.kill()
  parent.communicate()
  assert gone(pids)
  assert shared() <= before


@pytest.mark.slow
def test_memory_does_not_grow():
  pool = hosted.pool(gymnasium.make, 6, 2, name=TOY)
  token, _ = pool.init(np.arange(6))
  processes = [psutil.Process(), *map(psutil.Process, pool.pids)]
  action_TBA = np.random.default_rng(0).uniform(-1, 1, (20, 6, 1))
  sizes = []
  for t in range(1000):
    for action_BA in action_TBA:
      token, _ = pool.step(token, action_BA)
    if t in (499, 999):
      gc.collect()
      sizes.append([one.memory_info().rss for one in processes])
  for early, late in zip(*sizes, strict=True):
    assert late <= 1.02 * early
  pool.close()
