"""Traces of the profiler, and the memory of devices."""

import types

import jax
import jax.numpy as jnp
import pytest

from rlinf_jax.run import profile


def test_a_step_leaves_a_trace_if_that_is_wanted(tmp_path):
  with profile.record(tmp_path, False):
    jnp.ones(3).block_until_ready()
  assert not [*tmp_path.iterdir()]
  with profile.record(tmp_path):
    jax.jit(lambda x: x @ x)(jnp.ones((8, 8))).block_until_ready()
  (trace,) = tmp_path.glob('profile/**/*.xplane.pb')
  assert trace.stat().st_size


@pytest.mark.parametrize(
  'stats, want',
  [
    ([None, None], {}),  # As of processors.
    (
      [{'peak_bytes_in_use': 2**30}, {'peak_bytes_in_use': 3 * 2**30}],
      {'memory/peak_gib': 3.0},
    ),
  ],
)
def test_the_memory_is_that_of_the_fullest_device(monkeypatch, stats, want):
  devices = [types.SimpleNamespace(memory_stats=lambda s=s: s) for s in stats]
  monkeypatch.setattr(jax, 'local_devices', lambda: devices)
  assert profile.memory() == want
