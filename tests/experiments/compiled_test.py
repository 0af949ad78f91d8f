"""Stages of a model of real width, compiled for TPUs that are not here."""

import copy
import json
import math
import os
import pathlib
import subprocess
import sys

import pytest

import claims
from experiments.compiled import case as case_lib
from rlinf_jax.planning.compiled import topology as topology_lib

ROOT = pathlib.Path(__file__).parents[2]
RUN = """
import json, sys
from experiments.compiled import case
print(json.dumps(case.run(case.read(sys.argv[1]))))
"""


def report(name):
  """Compiles a case in a process of its own, as its topology needs."""
  kind = topology_lib.parse(case_lib.read(name).topology).kind
  missing = topology_lib.missing_package(kind)
  if missing:
    pytest.skip(f'{missing} is not installed: {topology_lib.EXTRA}.')
  done = subprocess.run(
    [sys.executable, '-c', RUN, name],
    cwd=ROOT,
    capture_output=True,
    text=True,
    env=os.environ | {'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': ''},
  )
  assert done.returncode == 0, done.stdout + done.stderr
  return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_long_completions_of_7b_are_generated_and_learned_on_eight_v5p_chips():
  """Two layers, groups of 16, prompts of 512 and 8,192 new tokens."""
  data = report('7b-2layers-8k-v5p8')
  assert data['refusal'] is None
  generate, apply = data['stages']
  assert (generate['name'], apply['name']) == ('generate', 'apply')
  for stage in (generate, apply):
    memory = stage['memory']
    assert memory['total'] < 0.95 * 95e9  # A twentieth is in reserve.
    assert memory['modeled'] == pytest.approx(memory['total'], rel=0.1)
    assert stage['scores'] is None and stage['unknown_loops'] == 0
  # Keys and values of two layers, four heads and 128 dimensions, in bfloat16: a
  # prompt on each chip, and its sixteen completions.
  cache = 2 * 2 * 4 * 128 * 2 * (512 + 16 * 8192)
  assert cache < generate['memory']['temporary']
  modeled = generate['modeled_matmul_flops']
  assert generate['matmul_flops'] == pytest.approx(modeled, rel=0.02)
  sent = generate['modeled_collective_bytes']
  assert generate['collective_bytes'] == pytest.approx(sent, rel=0.1)
  # float32: parameters and two moments in, and a gradient; all but it donated.
  leaf = apply['memory']['arguments'] / 4
  assert apply['memory']['donated'] == pytest.approx(3 * leaf, rel=0.01)
  assert apply['collective_bytes'] < 1000  # The norm of the gradient.


REAL = [  # 512 + 8,192 tokens, groups of 16.
  '7b-2layers-8k-gradient-v5p8',
  '7b-8k-parts-h100x8',
  '7b-8k-generate-h100x8',
]


@pytest.mark.slow
@pytest.mark.parametrize('name', claims.some(REAL, REAL[:1]))
def test_long_completions_of_7b_fit_and_cost_what_is_modeled(name):
  data = report(name)
  assert data['refusal'] is None  # So that it fits.
  for stage in data['stages']:
    memory, modeled = stage['memory'], stage['modeled_matmul_flops']
    assert memory['modeled'] == pytest.approx(memory['total'], rel=0.1)
    assert stage['matmul_flops'] == pytest.approx(modeled, rel=0.02)
    # `apply` sends the norm of the gradient, which is not modeled.
    sent = stage['modeled_collective_bytes']
    assert stage['collective_bytes'] == pytest.approx(sent, rel=0.1, abs=1000)
    assert stage['scores'] is None and stage['unknown_loops'] == 0


OFFLOADED = ['7b-offload-v5p8', '7b-offload-h100x8', '7b-offload-h100x1']


@pytest.mark.slow
@pytest.mark.parametrize('name', claims.some(OFFLOADED, OFFLOADED[:1]))
def test_moments_of_7b_stay_in_host_memory_while_they_are_updated(name):
  data = report(name)
  assert data['refusal'] is None
  (apply,) = data['stages']
  memory = apply['memory']
  # float32 of 7,615,616,512 parameters, on each device. Arguments there are
  # parameters and gradients, and two moments are not.
  leaf = 4 * 7_615_616_512 / math.prod(dict(case_lib.read(name).axes).values())
  assert memory['arguments'] == pytest.approx(2 * leaf, rel=0.001)
  assert memory['donated'] == pytest.approx(leaf, rel=0.001)
  # Two moments would take 2, and a TPU moves those of the vocabulary whole.
  assert memory['temporary'] < (0.6 if 'v5p' in name else 0.05) * leaf
  assert memory['modeled'] == pytest.approx(memory['total'], rel=0.1)


RECORDED = json.loads((case_lib.HERE / 'results.json').read_text())
# Without a compiler, it takes seconds to model a case.
CHEAP = '1b5-2layers-microbatch-h100x4'


def check(name, data):
  """Checks modeled costs of a case against what its compiler counted."""
  for stage in data['stages']:
    where, memory = (name, stage['name']), stage['memory']
    modeled = memory['modeled']
    assert modeled == pytest.approx(memory['total'], rel=0.1), where
    if case_lib.read(name).slots:
      continue  # Compilers do not know how long rows of slots are.
    sent = stage['collective_bytes']
    if sent > 1000:  # Otherwise the norm of the gradient alone.
      modeled = stage['modeled_collective_bytes']
      assert modeled == pytest.approx(sent, rel=0.1), where
    flops = stage['modeled_matmul_flops']
    assert flops == pytest.approx(stage['matmul_flops'], rel=0.02), where


def test_recorded_costs_are_within_a_tenth_of_the_model():
  for name, data in RECORDED.items():
    check(name, data)


def test_the_cases_that_were_refused_are_those_without_enough_memory():
  for name, data in RECORDED.items():
    usable = case_lib.cluster(case_lib.read(name)).capacity
    needed = max(stage['memory']['total'] for stage in data['stages'])
    assert (data['refusal'] is not None) == (needed > usable), name


@pytest.mark.slow
@pytest.mark.parametrize('name', claims.some(RECORDED, (CHEAP,)))
def test_the_model_of_today_is_within_a_tenth_of_recorded_costs(name):
  data = copy.deepcopy(RECORDED[name])
  for stage in data['stages']:  # Computed anew.
    stage['memory'].pop('modeled')
    stage.pop('modeled_matmul_flops')
    stage.pop('modeled_collective_bytes')
  case_lib.model_again(case_lib.read(name), data)
  check(name, data)
