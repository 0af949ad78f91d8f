"""Training on files of one's own, by the commands of the documentation."""

import json
import pathlib
import re
import shlex
import subprocess
import sys

import numpy as np
import pytest
import safetensors.numpy

import core_only
import front_door
import own_data
import saved

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).parents[4]
PAGE = ROOT / 'docs/data_and_reward.md'
SMALL = (
  '--gin.STEPS=3',
  '--gin.BATCH=4',
  '--gin.GROUP=4',
  '--gin.LENGTH=8',
  '--gin.SLOTS=4',
  '--gin.PROMPT=150',
  '--gin.BUCKETS=(115,)',
  '--gin.LEARNING_RATE=1e-3',
  '--gin.train.train.plan=None',
  '--gin.train.train.evaluate_every=2',
  '--gin.train.train.checkpoint_every=1',
  '--gin.train.train.keep_checkpoints=3',
  '--gin_bindings=from rewards_of_mine_too import rewards',
  '--gin.COLUMNS=terms',
  # A new model is never right.
  '--gin.REWARDS=[@functions.correct(), @functions.finishes, @rewards.vowels, '
  '@rewards.adds_up]',
  '--gin.WEIGHTS=[1.0, 0.0, 0.5, 0.0]',
)
MINE = """
def vowels(completion) -> float:
  return sum(c in 'aeiou' for c in completion.text) / completion.tokens


def adds_up(completion) -> float:
  return sum(completion.columns['terms']) == int(completion.answer)
"""


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  folder = tmp_path_factory.mktemp('own')
  own_data.model(folder / 'chat')
  own_data.write(folder / 'train.jsonl', range(20))
  own_data.write(folder / 'test.jsonl', range(20, 26))
  package = folder / 'rewards_of_mine_too'
  package.mkdir()
  (package / '__init__.py').touch()
  (package / 'rewards.py').write_text(MINE)
  return folder


def block(language: str) -> str:
  """The first block of a language on the page."""
  found = re.search(f'```{language}\n(.*?)```', PAGE.read_text(), re.S)
  return found[1]


def documented() -> list[str]:
  """The arguments of the first command of the page."""
  block = re.search(
    r'```sh\n(python -m rlinf_jax\.main .*?)```', PAGE.read_text(), re.S
  )
  return shlex.split(block[1].replace('\\\n', ' '))[3:]


def arguments(folder, workdir, *more, train='train.jsonl'):
  """The documented arguments with a small model, then others."""
  replacements = {
    '--gin.MODEL=': str(folder / 'chat/warm_start/model'),
    '--gin.TRAIN=': train,
    'runs/mine': str(workdir),
    'gin_configs/': f'{ROOT}/gin_configs/',
  }
  args = []
  for arg in documented():
    for start, value in replacements.items():
      if arg.startswith(start):
        rest = arg.removeprefix(start) if start.endswith('configs/') else ''
        arg = (start if start.startswith('--') else '') + value + rest
    args.append(arg)
  return [*args, *SMALL, *more]


@pytest.fixture
def here(folder, monkeypatch):
  """This process in that folder, from which it imports."""
  monkeypatch.chdir(folder)
  monkeypatch.syspath_prepend(folder)


def test_the_documented_command_trains_on_files(folder, tmp_path, here):
  done = front_door.run(*arguments(folder, tmp_path / 'run'))
  assert done.returncode == 0, done.stderr
  assert 'train.jsonl: 20 questions' in done.stdout
  assert 'batches of shape (4, 115), too: 2 shapes so far' in done.stdout
  lines = (tmp_path / 'run/metrics.jsonl').read_text().splitlines()
  steps = [x for x in map(json.loads, lines) if 'rollout/reward_mean' in x]
  evals = [x for x in map(json.loads, lines) if 'eval/accuracy' in x]
  assert [x['step'] for x in steps] == [1, 2, 3]
  for x in steps:
    vowels, total = x['rollout/reward/vowels'], x['rollout/reward_mean']
    right = x['rollout/reward/correct']
    np.testing.assert_allclose(total, right + 0.5 * vowels, rtol=1e-5)
    assert x['rollout/reward/failed'] == 0
    assert x['rollout/reward/adds_up'] == 1
  assert evals[0]['eval/reward/adds_up'] == 1
  assert {'eval/reward/vowels', 'eval/reward/finishes'} <= evals[0].keys()
  text = (tmp_path / 'run/samples.jsonl').read_text()
  samples = [json.loads(line) for line in text.splitlines()]
  assert {x['split'] for x in samples} == {'train', 'eval'}
  for x in samples:
    asked = re.search(r'(\d+)\+1=', x['prompt'])
    assert int(x['answer']) == int(asked[1]) + 1
  before, after = (
    safetensors.numpy.load_file(path / 'model.safetensors')
    for path in (folder / 'chat/warm_start/model', tmp_path / 'run/model')
  )
  assert before.keys() == after.keys()
  assert all((before[name] != after[name]).any() for name in before)

  straight = [x['rollout/reward_mean'] for x in steps]
  again = saved.stopped_after(1, tmp_path / 'run', tmp_path / 'again')
  rest = front_door.run(*arguments(folder, again, '--resume'))
  assert rest.returncode == 0, rest.stderr
  assert 'resumed after 1' in rest.stdout
  lines = (again / 'metrics.jsonl').read_text().splitlines()
  resumed = [
    x['rollout/reward_mean']
    for x in map(json.loads, lines)
    if 'rollout/reward_mean' in x
  ]
  assert resumed == straight


def test_bad_input_ends_in_a_sentence_and_leaves_nothing(
  folder, tmp_path, here
):
  (folder / 'bad.jsonl').write_text(
    '{"prompt": "a", "answer": "1", "terms": []}\n{"prompt": "b", "terms": []}'
  )
  args = arguments(folder, tmp_path / 'run', train='bad.jsonl')
  done = front_door.run(*args)
  assert done.returncode == 1
  assert 'bad.jsonl line 2 has no answer' in done.stderr
  assert 'Traceback' not in done.stderr
  assert not (tmp_path / 'run').exists()


def test_the_documented_python_trains_on_files(folder, tmp_path):
  model = str(folder / 'chat/warm_start/model')
  text = block('python')
  assert sum(bool(line) for line in text.splitlines()) <= 12
  template = r'{prompt} Answer in \boxed{}.'
  files = {'train': 'train.jsonl', 'held_out': 'test.jsonl'}
  program = f"""{text}
import functools
result = train_on_questions(
  {model!r},
  {files | {'template': template}},
  workdir={str(tmp_path / 'run')!r},
  steps=2,
  export=functools.partial(huggingface.export, checkpoint={model!r}),
)
assert result.steps == 2
"""
  done = subprocess.run(
    [sys.executable, '-c', program],
    cwd=folder,
    env=core_only.environment(ROOT),
    capture_output=True,
    text=True,
    timeout=600,
  )
  assert done.returncode == 0, done.stderr
  assert (tmp_path / 'run/report.html').exists()
  assert (tmp_path / 'run/model/config.json').exists()
