"""A place of several processes, on two machines, computes what one does.

The machines are two nodes of Ray on this one.
"""

import contextlib
import functools
import os
import signal
import socket
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest
import ray

from rlinf_jax.run import checkpoint
from rlinf_jax.runtime.base import ProcessDiedError
from rlinf_jax.runtime.ray import actor_pool
import stages
from tests.rlinf_jax.runtime import random_plans_test
from tests.rlinf_jax.runtime.ray import driver_test
from tests.stages.workflows import dapo_test
import tiny

pytestmark = pytest.mark.slow
far = driver_test.far  # The fixture.

NODE = [
  *(sys.executable, '-m', 'ray.scripts.scripts', 'start', '--block'),
  *('--disable-usage-stats', '--object-store-memory=100000000'),
]
TWO = {
  'places': {
    'actor': {'devices': [0]},
    'learner': {'devices': [1, 2], 'axes': [['data', 2]], 'processes': 2},
  },
  'stages': driver_test.TWO['stages'],
}
FOUR = {
  'places': {
    'all': {
      'devices': [0, 1, 2, 3],
      'axes': [['data', 2], ['fsdp', 2]],
      'processes': 2,
    }
  },
  'micro_batch': {'gradient': 16},
  'offload': ['apply'],
}


@contextlib.contextmanager
def cluster_of(*cpus):
  """Nodes of so many processors; their address."""
  with socket.socket() as free:
    free.bind(('', 0))
    port = free.getsockname()[1]
  address = f'127.0.0.1:{port}'
  joins = ['--head', f'--port={port}', '--include-dashboard=false']
  nodes = []
  try:
    for i, n in enumerate(cpus):
      nodes.append(subprocess.Popen([*NODE, *joins, f'--num-cpus={n}']))
      joins = [f'--address={address}']
      while i == 0 and not _listens(port):
        assert nodes[0].poll() is None
        time.sleep(0.1)
    yield address
  finally:
    for node in nodes:  # SIGTERM would drain it first.
      node.kill()
      node.wait()


def _listens(port):
  with socket.socket() as probe:
    return probe.connect_ex(('127.0.0.1', port)) == 0


@pytest.fixture(scope='module', autouse=True)
def here():
  with cluster_of(2, 2) as address:
    actor_pool.connect(address)
    while sum(node['Alive'] for node in ray.nodes()) < 2:
      time.sleep(0.1)
    yield
    ray.shutdown()


def test_two_processes_of_a_device_compute_the_same_bits(far, tmp_path):
  remote, near = far(TWO, driver_test.flows)
  got = driver_test.run(remote, driver_test.grpo())
  want = driver_test.run(near, driver_test.grpo())
  for one, other in zip(got, want, strict=True):
    tiny.assert_same_bits(one, other)
  assert {*remote.processes()} == {'actor', 'learner 1/2', 'learner 2/2'}
  assert {*remote.moved()} == {('actor', 'learner'), ('learner', 'actor')}
  # Either goes on from a checkpoint of the other.
  remote.load(_saved(near, tmp_path / 'near'), 3)
  near.load(_saved(remote, tmp_path / 'remote'), 3)
  for runtime in (remote, near):
    runtime.step(tiny.problem(seed=3), driver_test.KEY)
  tiny.assert_same_bits(remote.state(), near.state())
  near.close()


def _saved(runtime, folder):
  """The state of a runtime, by way of a disk."""
  files, source = checkpoint.Checkpoints(folder, 1), {'at': np.zeros(1)}
  files.save(checkpoint.CheckpointState(3, runtime.state(), source, {}))
  files.close()
  return checkpoint.Checkpoints(folder, 1).load(runtime.state(), source).state


def dapo():
  return dapo_test.dapo('float64')


def dapo_flows():
  return (
    tiny.trace(dapo(), tiny.problem()),
    tiny.trace_evaluation(dapo(), tiny.problem(4)),
  )


def test_two_processes_of_two_devices_compute_the_same_but_for_rounding(
  in_float64, far
):
  remote, near = far(FOUR, dapo_flows)
  made = []
  for runtime in (remote, near):
    runtime.load(dapo().init(driver_test.KEY))
    infos = [
      runtime.step(tiny.problem(seed=i), jax.random.key(i)) for i in range(2)
    ]
    made.append([[tiny.arrays(x) for x in (infos, runtime.state())]])
  random_plans_test.compare(remote.plan, *made)
  nodes = {one['node'] for one in remote.processes().values()}
  assert len(nodes) == 2  # Neither has four processors.
  near.close()


SPLIT = {
  'places': {
    'a': {'devices': [0, 1], 'axes': [['data', 2]], 'processes': 2},
    'b': {'devices': [2]},
  },
  'stages': {'check': 'b', '*': 'a'},
}


def batch(x, rows):
  return np.full(rows, x, np.float32)


def _sleep(x):
  if x.max() > 10:
    time.sleep(7)
  return x


sleep = stages.Stage(_sleep, 'check', host=True, out_shapes=driver_test.like)


def _gone(pids):
  deadline = time.monotonic() + 5
  while any(map(psutil.pid_exists, pids)):
    assert time.monotonic() < deadline, 'A process outlived its place.'
    time.sleep(0.1)


def test_the_death_of_one_process_is_that_of_its_place(far):
  rows = 1 << 19  # Too many to travel in calls.
  remote, _ = far(SPLIT, functools.partial(driver_test.simple, sleep, rows))
  for victim in ('a 1/2', 'b'):
    remote.load(jnp.zeros(()))
    assert remote.step(batch(1, rows), driver_test.KEY) == 2 * rows
    assert remote.state() == 2 * rows
    about = remote.processes()
    made = remote.submit(batch(9, rows), driver_test.KEY)
    time.sleep(0.5)
    start = time.monotonic()
    os.kill(about[victim]['pid'], signal.SIGKILL)
    with pytest.raises(
      ProcessDiedError, match=f"process of place '{victim}' has die"
    ):
      made.result(timeout=20)
    assert time.monotonic() - start < 5
    # Each may be in a call that the other will not come to.
    _gone([about[name]['pid'] for name in ('a 1/2', 'a 2/2')])


def test_stages_outside_of_jax_are_refused_there(far):
  sketch = {'places': {'a': SPLIT['places']['a']}}
  with pytest.raises(
    ValueError, match="check does not run in JAX, and place 'a' is of 2 proc"
  ):
    far(sketch, driver_test.simple)
