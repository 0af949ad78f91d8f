"""A place that spans processes computes what one process does.

Two nodes of Ray on this machine stand for two machines.
"""

import contextlib
import functools
import os
import secrets
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import psutil
import pytest
import ray

import claims
import local_ray
from rlinf_jax.run_files import checkpoint
from rlinf_jax.runtime import programs
from rlinf_jax.runtime.base import ProcessDiedError
from rlinf_jax.runtime.ray import connection
from rlinf_jax.state import state_readers
import saved
from tests.rlinf_jax.runtime.plans import random_plans_test
from tests.rlinf_jax.runtime.ray import driver_test
from tests.stages.workflows import dapo_test
import tiny

pytestmark = pytest.mark.slow
runtimes = driver_test.runtimes  # The fixture.

NODE = [
  sys.executable,
  '-m',
  'ray.scripts.scripts',
  'start',
  '--block',
  '--disable-usage-stats',
  '--object-store-memory=100000000',
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
  """Starts a node with each number of processors; yields their address."""
  port = _free_port()
  address = f'127.0.0.1:{port}'
  joins = ['--head', f'--port={port}', '--include-dashboard=false']
  nodes = []
  try:
    for i, n in enumerate(cpus):
      command = [*NODE, *joins, f'--num-cpus={n}']
      token = os.environ | {'RAY_AUTH_MODE': 'token'}
      nodes.append(subprocess.Popen(command, env=token))
      joins = [f'--address={address}']
      while i == 0 and not _listens(port):
        assert nodes[0].poll() is None
        time.sleep(0.1)
    yield address
  finally:
    for node in nodes:  # SIGTERM would drain the node first.
      node.kill()
      node.wait()


def _free_port() -> int:
  """A port that the system gives to no connection before Ray opens it."""
  for port in range(20_000 + os.getpid() % 5000, 32_000):
    with socket.socket() as free, contextlib.suppress(OSError):
      free.bind(('', port))
      return port
  raise OSError('No port from 20,000 to 32,000 is free.')


def _listens(port):
  with socket.socket() as probe:
    return probe.connect_ex(('127.0.0.1', port)) == 0


@pytest.fixture(scope='module', autouse=True)
def cluster():
  local_ray.end()
  os.environ.setdefault('RAY_AUTH_TOKEN', secrets.token_hex(32))
  with cluster_of(2, 2) as address:
    connection.connect(address)
    while sum(node['Alive'] for node in ray.nodes()) < 2:
      time.sleep(0.1)
    yield
    ray.shutdown()


@pytest.mark.parametrize(
  'dtype', claims.some(['float32', 'bfloat16'], keep=['bfloat16'])
)
def test_two_processes_of_a_device_compute_the_same_bits(
  runtimes, tmp_path, dtype
):
  """In bfloat16 both round their part of the parameters before sending it."""
  remote, local_ = runtimes(TWO, functools.partial(driver_test.flows, 0, dtype))
  make = functools.partial(driver_test.grpo, 0, dtype)
  got = driver_test.run(remote, make)
  want = driver_test.run(local_, make)
  tiny.assert_same_bits(got, want)
  assert {*remote.processes()} == {'actor', 'learner 1/2', 'learner 2/2'}
  assert {*remote.moved()} == {('actor', 'learner'), ('learner', 'actor')}
  # Each continues from a checkpoint of the other.
  readers = [
    _checkpoint(runtime, tmp_path / str(i))
    for i, runtime in enumerate((remote, local_))
  ]
  for runtime, reader in zip((local_, remote), readers, strict=True):
    runtime.start(reader, 3)
    runtime.step(tiny.problem(seed=3), driver_test.KEY)
  tiny.assert_same_bits(saved.state_of(remote), saved.state_of(local_))
  local_.close()


def _checkpoint(runtime, folder):
  """A reader of the state of a runtime, saved to disk."""
  files, source = checkpoint.Checkpoints(folder, 1), {'at': np.zeros(1)}
  files.save(3, runtime, source, {})
  files.close()
  shapes = programs.state_shapes(runtime.lowered['step'].flow)
  return checkpoint.Checkpoints(folder, 1).load(shapes, NONE, source).state


# There are no frozen parameters to read.
NONE = state_readers.FirstState(dict)


def dapo():
  return dapo_test.dapo('float64')


def dapo_flows():
  return (
    tiny.trace(dapo(), tiny.problem()),
    tiny.trace_evaluation(dapo(), tiny.problem(4)),
  )


def test_two_processes_of_two_devices_compute_the_same_up_to_rounding(
  in_float64, runtimes
):
  remote, local_ = runtimes(FOUR, dapo_flows)
  results = []
  for runtime in (remote, local_):
    make = functools.partial(driver_test.initial, dapo)
    runtime.start(state_readers.FirstState(make))
    infos = [
      runtime.step(tiny.problem(seed=i), jax.random.key(i)) for i in range(2)
    ]
    results.append([[tiny.arrays(x) for x in (infos, saved.state_of(runtime))]])
  random_plans_test.compare(remote.plan, *results)
  nodes = {one['node'] for one in remote.processes().values()}
  assert len(nodes) == 2  # No node has four processors.
  local_.close()


SPLIT = {
  'places': {
    'a': {'devices': [0, 1], 'axes': [['data', 2]], 'processes': 2},
    'b': {'devices': [2]},
  },
  'stages': {'check': 'b', '*': 'a'},
}


def batch(x, rows):
  return np.full(rows, x, np.float32)


def _gone(pids):
  deadline = time.monotonic() + 30
  while any(map(psutil.pid_exists, pids)):
    assert time.monotonic() < deadline, 'A process outlived its place.'
    time.sleep(0.1)


def test_the_death_of_one_process_stops_its_place(runtimes):
  rows = 1 << 19  # Too many to be sent in calls.
  remote, _ = runtimes(SPLIT, functools.partial(driver_test.simple, rows=rows))
  for victim in ('a 1/2', 'b'):
    remote.start(driver_test.first())
    assert remote.step(batch(1, rows), driver_test.KEY) == 2 * rows
    assert saved.state_of(remote) == 2 * rows
    about = remote.processes()
    slow = batch(driver_test.SLOW, rows)
    future = remote.submit(slow, driver_test.KEY)
    time.sleep(0.5)
    start = time.monotonic()
    os.kill(about[victim]['pid'], signal.SIGKILL)
    with pytest.raises(
      ProcessDiedError, match=f"process of place '{victim}' has die"
    ):
      future.result(timeout=60)
    assert time.monotonic() - start < 12  # Before the sleep ends.
    # Each may block in a collective that the other never joins.
    _gone([about[name]['pid'] for name in ('a 1/2', 'a 2/2')])


def test_host_stages_are_refused_on_a_place_that_spans_processes(runtimes):
  sketch = {'places': {'a': SPLIT['places']['a']}}
  with pytest.raises(
    ValueError, match="check does not run in JAX, and place 'a' is of 2 proc"
  ):
    runtimes(sketch, driver_test.simple)
