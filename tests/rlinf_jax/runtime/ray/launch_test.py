"""The driver of a run with Ray leaves accelerators to the places."""

import os
import subprocess
import sys

import jax
import pytest

from planner.ir import plan as plan_lib
from rlinf_jax.runtime.ray import connection, launch, resources

DRIVER = """
from rlinf_jax.runtime.ray import launch
launch.leave_accelerators()
import jax
print({device.platform for device in jax.devices()})
"""


def test_the_driver_computes_on_the_cpu_whatever_the_environment_says():
  done = subprocess.run(
    [sys.executable, '-c', DRIVER],
    env=os.environ | {'JAX_PLATFORMS': 'tpu'},  # It would not start on one.
    capture_output=True,
    text=True,
    timeout=120,
    check=False,
  )
  assert done.stdout.strip() == "{'cpu'}", done.stderr


CONNECT = """
import sys
from rlinf_jax.runtime.ray import connection
for address in sys.argv[1:]:
  try:
    connection.connect(address)
  except ValueError as error:
    print(error)
"""


def test_ray_is_not_started_or_joined_without_its_token():
  done = subprocess.run(
    [sys.executable, '-c', CONNECT, 'local', 'auto', 'ray://head:10001'],
    env=os.environ | {'RAY_AUTH_MODE': 'disabled'},
    capture_output=True,
    text=True,
    timeout=120,
    check=True,
  )
  refused = done.stdout.splitlines()
  assert len(refused) == 3
  for line in refused:
    assert line.startswith("RAY_AUTH_MODE is 'disabled', so that Ray would")


@pytest.mark.parametrize('error', [RuntimeError, Exception])
def test_a_ray_that_does_not_start_is_an_error_of_one_line(error, monkeypatch):
  def init(*args, **kwargs):
    raise error('Failed to start GCS.  Last 0 lines:\n\n.Please check')

  monkeypatch.setattr(connection.ray, 'is_initialized', lambda: False)
  monkeypatch.setattr(connection.ray, 'init', init)
  with pytest.raises(ConnectionError, match='Ray did not start.*check$'):
    connection.connect()


def test_a_cluster_without_a_token_is_not_joined(tmp_path):
  environment = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith('RAY_AUTH_')
  }
  done = subprocess.run(
    [sys.executable, '-c', CONNECT, '127.0.0.1:6379'],
    env=environment | {'HOME': str(tmp_path)},  # Ray's own token is there.
    capture_output=True,
    text=True,
    timeout=120,
    check=True,
  )
  assert done.stdout.startswith('There is no token for the Ray cluster at')


@pytest.mark.parametrize('kind', ['GPU', 'TPU'])
def test_places_use_the_devices_that_ray_gives_them(kind, monkeypatch):
  monkeypatch.setenv('JAX_PLATFORMS', 'cpu')  # Their processes inherit it.
  place = plan_lib.Placement()
  variables = resources.environment(place, {'CPU': 1.0, kind: 1.0})
  assert variables['JAX_PLATFORMS'] == ''
  variables = resources.environment(place, {'CPU': 1.0})
  assert variables['JAX_PLATFORMS'] == 'cpu'


def test_a_process_that_uses_accelerators_cannot_drive_a_run(monkeypatch):
  monkeypatch.setattr(connection, 'connect', lambda address: None)
  monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
  with pytest.raises(ValueError, match='JAX has started on the gpu .* JAX_PLA'):
    launch.connect('local')
