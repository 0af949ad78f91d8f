"""Compiling for accelerators that are not here, by the extra [aot]."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from rlinf_jax.planning.compiled import topology as topology_lib

ROOT = pathlib.Path(__file__).parents[4]
SCRIPT = ROOT / 'tests' / 'fixtures' / 'compile_tiny.py'


def report(name, *words):
  kind = topology_lib.parse(name).kind
  missing = topology_lib.missing_package(kind)
  if missing:
    pytest.skip(f'{missing} is not installed: {topology_lib.EXTRA}.')
  paths = ROOT, SCRIPT.parent, os.environ.get('PYTHONPATH', '')
  done = subprocess.run(
    [sys.executable, SCRIPT, name, *words],
    capture_output=True,
    text=True,
    env=os.environ | {'PYTHONPATH': ':'.join(map(str, paths)), 'XLA_FLAGS': ''},
  )
  assert done.returncode == 0, done.stdout + done.stderr
  return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize(
  'name',
  ['v5e:2x2', pytest.param('h100:1x1x4', marks=pytest.mark.claims)],
)
def test_a_tiny_gradient_compiles_for_an_accelerator_that_is_not_here(name):
  data = report(name, 'gradient')
  assert data['refusal'] is None
  (stage,) = data['stages']
  memory = stage['memory']
  assert 0 < memory['arguments'] < memory['needed'] <= memory['total'] < 1e9
  # Each product is seen, as often as its loop turns.
  assert stage['matmul_flops'] == stage['modeled_matmul_flops']
  assert stage['unknown_loops'] == 0
  axes = {x['axis'] for x in stage['collectives']}
  assert {'fsdp', 'tensor'} <= axes and '?' not in axes


@pytest.mark.slow
def test_a_gradient_with_the_kernel_compiles_for_a_tpu_that_is_not_here():
  data = report('v5e:2x2', 'gradient', 'splash')
  assert data['refusal'] is None
  (stage,) = data['stages']
  # The compiler turns the products of outputs and their gradients into sums.
  modeled = stage['modeled_matmul_flops']
  assert stage['matmul_flops'] == pytest.approx(modeled, rel=1e-3)
  assert stage['scores'] is None
  axes = {x['axis'] for x in stage['collectives']}
  assert {'fsdp', 'tensor'} <= axes and '?' not in axes
