"""Processes of a run listen on as few interfaces as possible."""

import contextlib
import functools
import os
import re
import secrets
import subprocess
import sys
from unittest import mock

import jax.numpy as jnp
import numpy as np
import psutil
import pytest
import ray

import claims
import fuzz
import local_ray
from planner.ir import plan as plan_lib
from rlinf_jax.runtime import programs
from rlinf_jax.runtime.ray import actor_pool, connection, driver
from rlinf_jax.runtime.ray.transport import network
from rlinf_jax.state import state_readers
from tests.rlinf_jax.runtime.ray import driver_test

SPLIT = {
  'places': {
    'a': {'devices': [0, 1], 'axes': [['data', 2]], 'processes': 2},
    'b': {'devices': [2]},
  },
  'stages': {'check': 'b', '*': 'a'},
}


def test_the_address_of_an_interface():
  assert network.address(network.LOOPBACK) == '127.0.0.1'
  with pytest.raises(ValueError, match="no network interface 'none9'.*'lo'"):
    network.address('none9')


def test_an_address_and_a_port_in_one_string():
  assert network.with_port('10.0.0.1', 0) == '10.0.0.1:0'
  assert network.with_port('::1', 80) == '[::1]:80'
  assert network.free_port('127.0.0.1') > 0


def listening(process):
  """Addresses and ports at which a process listens."""
  return {
    (one.laddr.ip.removeprefix('::ffff:'), one.laddr.port)  # As IPv4.
    for one in process.net_connections('inet')
    if one.status == psutil.CONN_LISTEN
  }


def ports(*others):
  """Addresses on which this process, its children and some others listen."""
  this, found = psutil.Process(), {}
  for process in {this, *this.children(recursive=True), *others}:
    with contextlib.suppress(psutil.NoSuchProcess):  # It has just ended.
      found[process] = listening(process)
  return found


def ports_of(run, earlier):
  """Of each process of a run, and of its Ray, where it listens.

  Without `earlier`, where other tests have this process listen.
  """
  places = [psutil.Process(one['pid']) for one in run.processes().values()]
  found = {
    process: opened - earlier for process, opened in ports(*places).items()
  }
  assert all(found[place] for place in places)
  return found


ROWS = 1 << 19  # Too many to be sent in calls.


@pytest.fixture(scope='module')
def earlier():
  """Addresses that are open before the run starts."""
  local_ray.end()
  return set().union(*ports().values())


@pytest.fixture(scope='module')
def run(earlier):
  """A run with a place of two processes and one of one, which pulls values."""
  record = functools.partial(driver_test.simple, rows=ROWS)
  step, evaluate = record()
  plan = plan_lib.parse(SPLIT, dict.fromkeys(step.stages + evaluate.stages))
  # As between accelerators.
  apart = mock.patch.object(
    actor_pool.ActorPool, 'same_machine', lambda pool, place: set()
  )
  with apart:
    connection.connect()
    runtime = driver.RayRuntime(plan, record, step=step, evaluate=evaluate)
    runtime.start(state_readers.FirstState(functools.partial(jnp.zeros, ())))
    yield runtime
    runtime.close()
    ray.shutdown()


STRANGER = """
import ray
ray.init({address!r}, logging_level='error')
print(ray.cluster_resources()['CPU'] > 0)
"""


def stranger(token):
  """A process that knows the address of the run's Ray, and some token."""
  address = ray.get_runtime_context().gcs_address
  return subprocess.run(
    [sys.executable, '-c', STRANGER.format(address=address)],
    env=os.environ
    | {'RAY_AUTH_TOKEN': token, 'RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER': '0'},
    capture_output=True,
    text=True,
    timeout=120,
    check=False,
  )


@pytest.mark.slow
def test_all_processes_of_a_run_on_one_machine_listen_on_loopback(run, earlier):
  for i in range(1, 3):
    batch = np.full(ROWS, i, np.float32)
    assert run.step(batch, driver_test.KEY) == 2 * i * ROWS
  lowered = run.lowered['step']
  edges = programs.traffic(lowered, run.transport)
  assert 'by a connection' in {how for *_, how, _ in edges}
  for process, opened in ports_of(run, earlier).items():
    assert {ip for ip, _ in opened} <= {'127.0.0.1'}, process.cmdline()
  # Ray admits who has the token of the run.
  assert 'True' in stranger(os.environ['RAY_AUTH_TOKEN']).stdout
  refused = stranger('0' * 64)
  assert refused.returncode and 'uthentication' in refused.stderr


def run_stranger(module, *arguments):
  """Runs a module in a process with another token; returns what it prints."""
  name = f'tests.rlinf_jax.runtime.ray.transport.{module}'
  return subprocess.run(
    [sys.executable, '-m', name, *arguments],
    env=os.environ | {'RAY_AUTH_TOKEN': secrets.token_hex(32)},
    capture_output=True,
    text=True,
    timeout=120,
    check=True,
  ).stdout.splitlines()


def addresses_of(run, earlier):
  """All addresses of the processes of a run, and of its Ray."""
  return sorted(
    {at for opened in ports_of(run, earlier).values() for at in opened}
  )


def contains_a_value(answer):
  """Whether an answer has a part of the values that the places exchange."""
  values = [np.full(8, x, np.float32).tobytes() for x in (1.75, 3.5)]
  return any(value in answer for value in values)


@pytest.mark.slow
def test_a_process_with_another_secret_obtains_nothing_from_any_port(
  run, earlier
):
  # The sums of these numbers are exact.
  batch = np.full(ROWS, 1.75, np.float32)
  assert run.step(batch, driver_test.KEY) == 3.5 * ROWS
  opened = addresses_of(run, earlier)
  answers = run_stranger('stranger', *(f'{ip}:{port}' for ip, port in opened))
  received = [*map(bytes.fromhex, answers)]
  assert len(received) > 8 * len(opened)
  assert any(received)  # Ray answers a gRPC client.
  for answer in received:
    assert len(answer) < 1 << 16
    assert not contains_a_value(answer)
  assert run.step(2 * batch, driver_test.KEY) == 7 * ROWS


@pytest.mark.slow
@pytest.mark.parametrize('n', claims.some((40, 10_000), keep=(40,)))
def test_random_messages_on_all_ports_stop_nothing(n, run, earlier):
  batch = np.full(ROWS, 1.75, np.float32)
  assert run.step(batch, driver_test.KEY) == 3.5 * ROWS
  before = {
    process for process, opened in ports_of(run, earlier).items() if opened
  }
  opened = addresses_of(run, earlier)
  assert len(opened) > 8
  for answer in fuzz.answers(opened, n):
    assert not contains_a_value(answer)
    assert not re.search(rb'HTTP/1\.1 200.*(token|KEY)', answer, re.S)
  assert all(process.is_running() for process in before)
  assert run.step(2 * batch, driver_test.KEY) == 7 * ROWS
