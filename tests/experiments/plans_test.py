import json
import pathlib
import re
import shutil

import jax
import pytest

from experiments.plans import __main__ as plans_main
from experiments.plans import models
from stages.language import huggingface, tokens
from stages.models.layers import cudnn

ROOT = pathlib.Path(__file__).parents[2]
PAGE = ROOT / 'experiments/plans/README.md'
# Parameters as published, in billions, by the names of the models.
BILLIONS = {
  'DeepSeek-R1-Distill-Qwen-1.5B': 1.78,
  'DeepSeek-R1-Distill-Qwen-7B': 7.62,
  'DeepSeek-R1-Distill-Qwen-32B': 32.8,
  'Qwen2.5-7B': 7.62,
  'Qwen2.5-32B': 32.8,
  'Qwen3-30B-A3B-Base': 30.5,
}


def place(first, count, **axes):
  devices = [*range(first, first + count)]
  return {'devices': devices, 'axes': [[*axis] for axis in axes.items()]}


def report(**places):
  plan = {
    'places': places,
    'stages': {'repeat': 'p0', 'proximal_logp': 'p1', 'apply': 'p0'},
    'offload': [],
    'pieces': 1,
  }
  searched = {'proved': True, 'gap': 0.0}
  return {
    'plan': plan,
    'searched': searched,
    'seconds': 2581.4,
    'cpu_seconds': 71.6,
  }


def test_a_line_has_meshes_of_one_place_and_of_generation():
  data = report(all=place(0, 64, fsdp=64))
  data['plan']['places']['generation'] = place(0, 64, fsdp=16, tensor=4)
  data['plan']['offload'] = ['apply']
  assert plans_main.line('grpo_qwen2.5_7b/h100x64', data) == (
    '| `grpo_qwen2.5_7b` | 64 H100 | `fsdp=64`; generation on '
    '`fsdp=16 tensor=4`; moments in host memory | 2,580 | proved | 72 |'
  )


def test_a_line_has_the_first_stage_of_each_of_several_places():
  data = report(p0=place(0, 4, data=4), p1=place(4, 4, fsdp=2, tensor=2))
  data['plan']['pieces'] = 2
  data['searched'] = {'proved': False, 'gap': 0.123}
  assert plans_main.line('ppo_qwen2.5_7b/tpu_v5p_8', data) == (
    '| `ppo_qwen2.5_7b` | 8 v5p | repeat … on 4, `data=4`; proximal_logp … on '
    '4, `fsdp=2 tensor=2`; 2 pieces | 2,580 | gap 12.3% | 72 |'
  )


def test_rows_with_a_file_are_not_planned_again(tmp_path, monkeypatch, capsys):
  rows = 'grpo_qwen2.5_7b/h100', 'grpo_qwen2.5_7b/h100x64'
  made = []

  def command(row, bindings, file):
    made.append(row)
    assert {*bindings} == {'MODEL', 'TRAIN', 'EVAL'}
    data = report(all=place(0, 8, fsdp=8)) | {'seconds': 7.0}
    saved = tmp_path / 'data.json'
    saved.write_text(json.dumps(data))
    return [shutil.which('cp'), str(saved), str(file)]

  monkeypatch.setattr(plans_main, 'command', command)
  monkeypatch.setattr(cudnn, 'is_here', lambda: True)
  for names in (rows[:1], rows):
    monkeypatch.setattr('sys.argv', ['plans', str(tmp_path), *names])
    plans_main.main()
  assert made == [*rows]
  first = '| `grpo_qwen2.5_7b` | 8 H100 | `fsdp=8` | 7 | proved | 0 |'
  assert capsys.readouterr().out.count(first) == 3  # Of the second row, too.


@pytest.mark.parametrize('name', ['grpo_qwen2.5_7b', 'grpo/h100', 'a/b'])
def test_an_unknown_row_is_refused_with_an_example(
  name, tmp_path, monkeypatch, capsys
):
  monkeypatch.setattr('sys.argv', ['plans', str(tmp_path), name])
  with pytest.raises(SystemExit):
    plans_main.main()
  assert 'rows are such as grpo_qwen2.5_1.5b/h100' in capsys.readouterr().err


def test_the_page_has_every_row_in_order():
  found = re.findall(
    r'^\| `(\w[\w.]*)` \| (\d+ \w+)†? \|', PAGE.read_text(), re.M
  )
  devices = dict(
    zip(
      plans_main.CLUSTERS,
      ['8 H100', '64 H100', '256 H100', '8 v5p', '64 v5p', '256 v5p'],
      strict=True,
    )
  )
  expected = [row.split('/') for row in plans_main.ROWS]
  assert found == [(recipe, devices[where]) for recipe, where in expected]


@pytest.mark.parametrize('name', models.CONFIGS)
def test_models_have_their_published_number_of_parameters(name, tmp_path):
  bindings = models.write(tmp_path, name)
  policy = huggingface.policy(bindings['MODEL'], response_length=8)
  shapes = jax.eval_shape(policy.init, jax.random.key(0))
  count = sum(x.size for x in jax.tree.leaves(shapes))
  assert count / 1e9 == pytest.approx(BILLIONS[name], rel=0.003)
  assert tokens.load_tokenizer(bindings['MODEL']).chat_template
