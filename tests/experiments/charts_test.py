"""The experiment on charts: its recipes are read, and its reward."""

import pytest

from experiments.charts import rewards
from rlinf_jax import train
from rlinf_jax.config import config
from rlinf_jax.prepare import tiny_vision
from rlinf_jax.rewards import base
from rlinf_jax.runtime import flows as flows_lib


@pytest.fixture(scope='module')
def charts(tmp_path_factory):
  folder = tmp_path_factory.mktemp('charts')
  tiny_vision.model(folder / 'model')
  for name in 'train', 'test':
    tiny_vision.write(folder, name, 64, held_out=name == 'test')
  return folder


@pytest.mark.parametrize('name, stage', [('format', None), ('grpo', 'reward')])
def test_a_recipe_is_read(charts, tmp_path, name, stage):
  files = {'MODEL': 'model', 'TRAIN': 'train.jsonl', 'EVAL': 'test.jsonl'}
  bindings = [f'{k} = {str(charts / x)!r}' for k, x in files.items()]
  config.parse([f'experiments/charts/{name}.gin'], bindings, str(tmp_path))
  step, _ = config.call(flows_lib.trace_flows, bindings_of=train.train)
  assert 'gradient' in step.stages
  assert (stage in step.stages) == (stage is not None)


@pytest.mark.parametrize(
  'text, reward', [('3', 1.0), (' 3\n', 1.0), ('33', 0.0), ('', 0.0)]
)
def test_the_digit_of_the_answer_is_rewarded(text, reward):
  asked = base.Completion(text, 'How tall is the red bar?', '3', 2, 2)
  assert rewards.same_digit(asked) == reward
