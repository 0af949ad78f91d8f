"""Bad files and models of one's own: a sentence, exit code 1, and no folder."""

import json
import shutil

import jax
import pytest

import front_door
import own_data
from rlinf_jax.prepare import warm_start
from stages.language import huggingface
from stages.models import lora

RIGHT = {'prompt': '1+1=?', 'answer': '2'}
FILES = {
  'empty.jsonl': '',
  'unanswered.jsonl': f'{json.dumps(RIGHT)}\n{{"prompt": "1+2=?"}}\n',
  'unanswered.csv': 'prompt,answer\n1+1=?,2\n1+2=?,\n',
  'renamed.jsonl': '{"ask": "1+1=?", "answer": "2"}\n',
  'long.jsonl': json.dumps(RIGHT | {'prompt': '1+' * 200 + '1'}),
}
# Settings of `grpo_math`, and the beginning of the only line of error; {here}
# is a folder of `FILES`, a model without a chat template and an adapter.
WRONG = [
  ({'TRAIN': '{here}/none.jsonl'}, 'There is no file {here}/none.jsonl'),
  (
    {'TRAIN': '{here}'},
    '{here} is a folder: name one of its files, such as `empty.jsonl`, ',
  ),
  ({'EVAL': '{here}/bare'}, '{here}/bare is a folder: name one of its files.'),
  ({'TRAIN': '{here}/empty.jsonl'}, '{here}/empty.jsonl has no rows'),
  ({'EVAL': '{here}/empty.jsonl'}, '{here}/empty.jsonl has no rows'),
  (
    {'TRAIN': '{here}/unanswered.jsonl'},
    "{here}/unanswered.jsonl line 2 has no answer in 'answer'",
  ),
  (
    {'EVAL': '{here}/unanswered.csv'},
    "{here}/unanswered.csv line 3 has no answer in 'answer'",
  ),
  (
    {'TRAIN': '{here}/renamed.jsonl'},
    '{here}/renamed.jsonl line 1 has none of the columns `prompt`',
  ),
  (
    {'QUESTION': 'ask'},
    "{here}/train.jsonl line 1 has no column 'ask'; its columns are `prompt`",
  ),
  (
    {'ANSWER': 'solution'},
    "{here}/train.jsonl line 1 has no column 'solution'; its columns are",
  ),
  (
    {'COLUMNS': 'tests'},
    "{here}/train.jsonl line 1 has no column 'tests'; its columns are",
  ),
  (
    {'TRAIN': '{here}/long.jsonl'},
    'All 1 questions of long.jsonl have more than 300 tokens',
  ),
  ({'MODEL': '{here}/bare'}, 'The tokenizer of {here}/bare has no chat'),
  ({'MODEL': '{here}/adapter'}, '{here}/adapter holds an adapter of PEFT'),
  (
    {'LORA_ADAPTER': '{here}/adapter'},
    'The adapter {here}/adapter (of ',
  ),
  ({'PACKED': '50'}, 'A packed row has room for 50 tokens, and a prompt'),
]


@pytest.fixture(scope='module')
def here(tmp_path_factory):
  here = tmp_path_factory.mktemp('here')
  model = own_data.model(here / 'own')
  bare = shutil.copytree(model, here / 'bare')
  (bare / 'chat_template.jinja').unlink()
  wider = warm_start.checkpoint(
    str(here / 'wider'),
    corpus=own_data.corpus,
    vocabulary=100,
    width=48,
    layers=2,
    heads=4,
    kv_heads=2,
    feed_forward=64,
  )
  policy = huggingface.policy(wider, response_length=4, lora=lora.Lora(rank=2))
  huggingface.export(here / 'adapter', policy.init(jax.random.key(0)), wider)
  for name, text in FILES.items():
    (here / name).write_text(text)
  files = {
    'MODEL': model,
    'TRAIN': own_data.write(here / 'train.jsonl', range(20)),
    'EVAL': own_data.write(here / 'test.jsonl', range(20, 26)),
  }
  return here, files


@pytest.mark.parametrize(
  ('settings', 'line'), WRONG, ids=[' '.join(x) for x, _ in WRONG]
)
def test_it_is_refused_in_a_sentence_and_nothing_is_written(
  settings, line, here, tmp_path
):
  folder, files = here
  sizes = {'PROMPT': '300', 'LENGTH': '8', 'BATCH': '4', 'GROUP': '4'}
  given = files | sizes | settings
  before = sorted(folder.rglob('*'))
  done = front_door.run(
    '--gin_file=gin_configs/grpo_math.gin',
    *(f'--gin.{k}={v.format(here=folder)}' for k, v in given.items()),
    f'--workdir={tmp_path}/run',
  )
  assert done.returncode == 1
  (only,) = done.stderr.strip().splitlines()
  assert only.startswith(line.format(here=folder))
  assert not list(tmp_path.iterdir())
  assert sorted(folder.rglob('*')) == before


def test_some_prompts_over_the_limit_are_left_out_and_counted(here, tmp_path):
  folder, files = here
  mixed = tmp_path / 'mixed.jsonl'
  rows = (folder / name for name in ('train.jsonl', 'long.jsonl'))
  mixed.write_text('\n'.join(x.read_text() for x in rows))
  given = files | {'PROMPT': '300', 'TRAIN': str(mixed), 'STEPS': '0'}
  done = front_door.run(
    '--gin_file=gin_configs/grpo_math.gin',
    *(f'--gin.{k}={v}' for k, v in given.items()),
    '--gin.train.train.plan=None',
    '--gin.train.train.evaluate_every=0',
    f'--workdir={tmp_path}/run',
  )
  assert done.returncode == 0, done.stderr
  assert 'mixed.jsonl: 20 questions' in done.stdout
  assert '1 of more than 300 tokens left out' in done.stdout
