import subprocess
import sys

import pytest

from rlinf_jax.system import allocator

FAULTS = """
import resource, sys
import numpy as np
from rlinf_jax.system import allocator

def faults():
  return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

retained = allocator.retain_freed_memory() if sys.argv[1] == 'retain' else True
np.ones(1 << 22)
before = faults()
for _ in range(10):
  np.ones(1 << 22)
print(retained, faults() - before)
"""


def faults(how):
  result = subprocess.run(
    [sys.executable, '-c', FAULTS, how],
    check=True,
    capture_output=True,
    text=True,
  )
  retained, number = result.stdout.split()
  return retained == 'True', int(number)


def test_retained_memory_causes_no_page_faults():
  retained, few = faults('retain')
  if not retained:
    pytest.skip('not glibc')
  _, many = faults('default')
  assert few < many / 10


def test_other_c_libraries_are_unchanged(monkeypatch):
  monkeypatch.setattr(allocator.ctypes, 'CDLL', lambda name: object())
  assert not allocator.retain_freed_memory()


def test_gpus_are_taken_as_plans_assume_unless_the_environment_says(
  monkeypatch,
):
  found = {}
  monkeypatch.setattr(allocator.os, 'environ', found)
  monkeypatch.setattr(allocator.importlib.util, 'find_spec', lambda name: name)
  allocator.claim_accelerators()
  assert found == {
    'XLA_CLIENT_MEM_FRACTION': '0.9',
    'XLA_PYTHON_CLIENT_ALLOCATOR': 'cuda_async',
  }
  # JAX refuses the older name of a variable beside the newer one.
  given = {
    'XLA_PYTHON_CLIENT_MEM_FRACTION': '0.5',
    'XLA_PYTHON_CLIENT_ALLOCATOR': 'bfc',
  }
  monkeypatch.setattr(allocator.os, 'environ', {**given})
  allocator.claim_accelerators()
  assert allocator.os.environ == given
  # Only CUDA's plugins have such pools.
  monkeypatch.setattr(allocator.os, 'environ', found := {})
  monkeypatch.setattr(allocator.importlib.util, 'find_spec', lambda name: None)
  allocator.claim_accelerators()
  assert found == {'XLA_CLIENT_MEM_FRACTION': '0.9'}
