"""Compiling for accelerators that are not here, by the extra [aot]."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from rlinf_jax.planning.compiled import topology as topology_lib
from stages.models.layers import cudnn

ROOT = pathlib.Path(__file__).parents[4]
SCRIPT = ROOT / 'tests' / 'fixtures' / 'compile_tiny.py'
NEEDS_CUDNN = pytest.mark.skipif(
  not cudnn.is_here(), reason='JAX finds no cuDNN here.'
)


def report(name, *words, script=SCRIPT):
  kind = topology_lib.parse(name).kind
  missing = topology_lib.missing_package(kind)
  if missing:
    pytest.skip(f'{missing} is not installed: {topology_lib.EXTRA}.')
  paths = ROOT, SCRIPT.parent, os.environ.get('PYTHONPATH', '')
  done = subprocess.run(
    [sys.executable, script, name, *words],
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
@pytest.mark.parametrize(
  ('name', 'settings', 'tolerance'),
  [
    # The compiler turns products of outputs and their gradients into sums.
    ('v5e:2x2', ('splash',), 1e-3),
    pytest.param(
      'h100:1x1x4',
      ('cudnn', 'bfloat16'),
      1e-2,  # In bfloat16, it computes some small products twice.
      marks=[pytest.mark.claims, NEEDS_CUDNN],
    ),
  ],
)
def test_a_gradient_with_a_kernel_compiles_for_what_is_not_here(
  name, settings, tolerance
):
  data = report(name, 'gradient', *settings)
  assert data['refusal'] is None
  (stage,) = data['stages']
  modeled = stage['modeled_matmul_flops']
  assert stage['matmul_flops'] == pytest.approx(modeled, rel=tolerance)
  assert stage['scores'] is None
  axes = {x['axis'] for x in stage['collectives']}
  assert {'fsdp', 'tensor'} <= axes and '?' not in axes


@pytest.mark.slow
@pytest.mark.claims
@NEEDS_CUDNN
def test_attention_to_all_keys_calls_cudnn_in_both_passes():
  script = SCRIPT.with_name('compile_bidirectional.py')
  data = report('h100:1x1x4', script=script)
  # A mask by lengths: with a bias, its gradient would be computed, too.
  assert data['calls'] == [
    ['fmhaSoftmax', 'PADDING'],
    ['fmhaSoftmaxBackward', 'PADDING'],
  ]
  assert data['matmul_flops'] == data['modeled_matmul_flops'] > 0


@pytest.mark.slow
def test_a_tpu_program_compiles_with_the_memory_that_is_read_and_no_less():
  """Its memory analysis says 11 % more, of a loop that stores its inputs."""
  missing = topology_lib.missing_package('v5e')
  if missing:
    pytest.skip(f'{missing} is not installed: {topology_lib.EXTRA}.')
  path = os.pathsep.join([str(ROOT), os.environ.get('PYTHONPATH', '')])
  done = subprocess.run(
    [sys.executable, SCRIPT.with_name('compile_with_limits.py')],
    capture_output=True,
    text=True,
    env=os.environ | {'PYTHONPATH': path, 'XLA_FLAGS': ''},
  )
  assert done.returncode == 0, done.stdout + done.stderr
  found = json.loads(done.stdout.splitlines()[-1])
  assert found['accepted'] and found['refused']
  assert found['said'] > 1.1 * found['needed']
