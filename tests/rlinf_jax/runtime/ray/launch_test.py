"""The driver of a run with Ray leaves accelerators to the places."""

import os
import subprocess
import sys

import jax
import pytest

from planner.ir import plan as plan_lib
from rlinf_jax.runtime.ray import actor_pool, launch, resources

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


@pytest.mark.parametrize('kind', ['GPU', 'TPU'])
def test_places_use_the_devices_that_ray_gives_them(kind, monkeypatch):
  monkeypatch.setenv('JAX_PLATFORMS', 'cpu')  # Their processes inherit it.
  place = plan_lib.Placement()
  variables = resources.environment(place, {'CPU': 1.0, kind: 1.0})
  assert variables['JAX_PLATFORMS'] == ''
  variables = resources.environment(place, {'CPU': 1.0})
  assert variables['JAX_PLATFORMS'] == 'cpu'


def test_a_process_that_uses_accelerators_cannot_drive_a_run(monkeypatch):
  monkeypatch.setattr(actor_pool, 'connect', lambda address: None)
  monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
  with pytest.raises(ValueError, match='JAX has started on the gpu .* JAX_PLA'):
    launch.connect('local')
