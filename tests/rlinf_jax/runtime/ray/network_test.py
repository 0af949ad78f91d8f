"""Processes of a run listen on as few interfaces as possible."""

import os
import subprocess
import sys

import psutil
import pytest
import ray

from planner.ir import plan as plan_lib
from rlinf_jax.runtime.ray import actor_pool, driver, network
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


def listening(pid):
  """Addresses at which a process listens, by port."""
  return {
    one.laddr.port: one.laddr.ip
    for one in psutil.Process(pid).net_connections('inet')
    if one.status == psutil.CONN_LISTEN
  }


@pytest.fixture(scope='module')
def run():
  """A run with a place of two processes and one of one."""
  actor_pool.connect()
  step, evaluate = driver_test.simple()
  plan = plan_lib.parse(SPLIT, dict.fromkeys(step.stages + evaluate.stages))
  runtime = driver.RayRuntime(
    plan, driver_test.simple, step=step, evaluate=evaluate
  )
  runtime.load(driver_test.jnp.zeros(()))
  assert runtime.step(driver_test.batch(1), driver_test.KEY) == 8
  yield runtime
  runtime.close()
  ray.shutdown()
