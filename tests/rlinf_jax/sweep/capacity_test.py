"""Cores and memory limit how many points run."""

import subprocess
import sys
import time

import pytest

from rlinf_jax.sweep import capacity, grid, process
from rlinf_jax.system import memory


def job(folder, stepped=True):
  """A running point, as far as its capacity is decided."""
  folder.mkdir()
  if stepped:
    (folder / 'metrics.jsonl').touch()
  point = grid.Point(folder.name, folder, {})
  return process.RunningPoint(
    point, None, time.monotonic() - 5, folder / 'err', 0
  )


@pytest.mark.parametrize(
  ('most', 'available', 'stepped', 'expected'),
  [
    (4, 100.0, True, True),
    (2, 100.0, True, False),  # As many run as the cores allow.
    (4, 100.0, False, False),  # The memory of the second is not known yet.
    (4, 18.4, True, False),
    (4, 18.6, True, True),
  ],
)
def test_cores_and_memory_limit_how_many_points_run(
  tmp_path, monkeypatch, most, available, stepped, expected
):
  monkeypatch.setattr(capacity, 'INTERVAL', 0.0)
  used = {'a': 10.0, 'b': 4.0}
  room = capacity.Capacity(
    most, lambda: available, lambda one: used[one.point.name]
  )
  running = [job(tmp_path / 'a'), job(tmp_path / 'b', stepped)]
  assert room.may_start([])
  # The smaller one may grow by 6, and a third may need 12.5.
  assert room.may_start(running) == expected


def test_memory_of_a_point_is_that_of_its_processes():
  code = (
    'import subprocess, sys\n'
    'x = bytearray(20_000_000)\n'
    "hold = 'x = bytearray(30_000_000); input()'\n"
    "subprocess.run([sys.executable, '-S', '-c', hold])\n"
  )
  parent = subprocess.Popen(
    [sys.executable, '-S', '-c', code], stdin=subprocess.PIPE
  )
  one = process.RunningPoint(None, parent, 0.0, None, 0)
  end = time.monotonic() + 60
  while capacity.used_memory(one) < 50e6:
    assert time.monotonic() < end
    time.sleep(0.02)
  parent.communicate(b'\n')
  assert capacity.used_memory(one) == 0
  assert memory.available() > 0
