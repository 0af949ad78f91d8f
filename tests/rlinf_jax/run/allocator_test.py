import subprocess
import sys

import pytest

from rlinf_jax.run import allocator

FAULTS = """
import resource, sys
import numpy as np
from rlinf_jax.run import allocator

def faults():
  return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

kept = allocator.keep() if sys.argv[1] == 'keep' else True
np.ones(1 << 22)
before = faults()
for _ in range(10):
  np.ones(1 << 22)
print(kept, faults() - before)
"""


def faults(how):
  made = subprocess.run(
    [sys.executable, '-c', FAULTS, how],
    check=True,
    capture_output=True,
    text=True,
  )
  kept, number = made.stdout.split()
  return kept == 'True', int(number)


def test_memory_that_is_kept_is_not_faulted_in_again():
  kept, few = faults('keep')
  if not kept:
    pytest.skip('not glibc')
  _, many = faults('leave')
  assert few < many / 10


def test_other_libraries_are_left_alone(monkeypatch):
  monkeypatch.setattr(allocator.ctypes, 'CDLL', lambda name: object())
  assert not allocator.keep()
