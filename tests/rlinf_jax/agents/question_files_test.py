"""Questions of files that a text environment asks."""

import json
import pathlib

import numpy as np
import pytest

import front_door
import own_data
from rlinf_jax.agents import formats, problems, tool_env
from rlinf_jax.agents.tools import calculator
from rlinf_jax.data import questions, text_arrays
from stages.language import tokens

TEMPLATE = (
  '{% for m in messages %}{{ m.role }}:{{ m.content }}{{ eos_token }}'
  '{% endfor %}assistant:'
)
WITH_TOOLS = '{% for t in tools %}{{ t.function.name }};{% endfor %}' + TEMPLATE


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """A tokenizer with a chat template, and a file of questions."""
  folder = tmp_path_factory.mktemp('questions')
  printable = ''.join(map(chr, range(32, 127)))
  tokenizer = tokens.train_tokenizer(folder / 'model', [printable] * 2, 99)
  tokenizer.chat_template = WITH_TOOLS
  tokenizer.save_pretrained(folder / 'model')
  rows = [
    {'question': f'{i}+1?', 'answer': f'so\n#### {i + 1}'} for i in range(9)
  ]
  rows.append({'question': '1+' * 50, 'answer': '50'})
  (folder / 'a.jsonl').write_text('\n'.join(map(json.dumps, rows)))
  return folder


def make(**settings):
  return tool_env.ToolEnv(
    [calculator.calculator],
    parse=formats.pythonic,
    **{'system_prompt': 'Be brief.', 'template': 'Q: {prompt}', **settings},
  )


def source(folder, make=make, **settings):
  return questions.questions(
    str(folder / 'model'),
    **{
      'train': str(folder / 'a.jsonl'),
      'held_out': str(folder / 'a.jsonl'),
      'batch_size': 4,
      'prompt_length': 64,
      'opening': problems.opening(make),
      'drop_long': True,
      **settings,
    },
  )


def test_the_environment_writes_the_prompt_and_gets_the_problem(folder, capsys):
  (batch, *_) = source(folder).held_out()
  assert '1 of more than 64 tokens left out' in capsys.readouterr().out
  tokenizer = tokens.load_tokenizer(folder / 'model')
  first = tokenizer.decode(batch.prompt.token[0, batch.prompt.mask[0] > 0])
  end = tokenizer.eos_token
  assert first == (
    f'calculator;system:Be brief.{end}user:Q: 0+1?{end}assistant:'
  )
  problem = json.loads(text_arrays.unpack(batch.answer)[0])
  assert problem == {'question': '0+1?', 'answer': '1'}
  assert make().reset(problem)[1]['content'] == 'Q: 0+1?'


def test_an_epoch_asks_every_question_once(folder):
  made, asked = source(folder, batch_size=3), []
  state = made.init(0)
  for _ in range(3):
    state, batch = made.next(state, {})
    asked += [
      json.loads(x)['question'] for x in text_arrays.unpack(batch.answer)
    ]
  assert sorted(asked) == [f'{i}+1?' for i in range(9)]


def test_tools_that_a_template_leaves_out_must_be_in_the_system_prompt(
  folder, tmp_path
):
  tokenizer = tokens.load_tokenizer(folder / 'model')
  tokenizer.chat_template = TEMPLATE
  tokenizer.save_pretrained(tmp_path / 'model')
  refused = pytest.raises(ValueError, match='does not tell the model of its to')
  rows = (folder / 'a.jsonl').read_text().splitlines()
  asks = json.dumps({'question': 'What is a calculator?', 'answer': 'a tool'})
  for first in ([], [asks]):  # A question that has its name declares no tool.
    (tmp_path / 'a.jsonl').write_text('\n'.join([*first, *rows]))
    with refused:
      source(tmp_path)
  with refused:
    source(tmp_path, lambda: make(system_prompt='Two calculators.'))
  named = 'Call [calculator(expression="1+1")].'
  source(tmp_path, lambda: make(system_prompt=named), prompt_length=99)


def test_what_the_environment_writes_is_not_asked_for_twice(folder, tmp_path):
  for settings in {'template': 'Q {prompt}'}, {'system_prompt': 'Be brief.'}:
    with pytest.raises(ValueError, match='give them to the environment'):
      source(folder, **settings)
  with pytest.raises(ValueError, match='does not say where the question goes'):
    make(template='Q')
  row = {'messages': [{'role': 'user', 'content': 'x'}], 'answer': '1'}
  (tmp_path / 'a.jsonl').write_text(json.dumps(row))
  with pytest.raises(ValueError, match='give questions as text'):
    source(folder, train=str(tmp_path / 'a.jsonl'))


@pytest.mark.parametrize(
  'text, score', [('so it is 1/2', 1.0), ('0.5', 1.0), ('0.25', 0.0), ('', 0.0)]
)
def test_mathematics_that_is_equal_is_right(text, score):
  assert tool_env.same_mathematics(text, '0.5') == score


def test_references_travel_with_their_rows(folder):
  made = source(folder, batch_size=9)
  _, batch = made.next(made.init(1), {})
  tokenizer = tokens.load_tokenizer(folder / 'model')
  texts = tokens.decode(tokenizer, batch.prompt.token, batch.prompt.mask)
  for text, problem in zip(
    texts, text_arrays.unpack(batch.answer), strict=True
  ):
    assert json.loads(problem)['question'] in text
  assert isinstance(batch.answer, np.ndarray)


@pytest.mark.slow
def test_a_recipe_trains_on_questions_of_a_file_with_tools(folder, tmp_path):
  model = pathlib.Path(own_data.model(tmp_path / 'own'))
  tokenizer = tokens.load_tokenizer(model)
  tokenizer.chat_template = TEMPLATE
  tokenizer.save_pretrained(model)
  tokens.load_tokenizer.cache_clear()
  sizes = {'PROMPT': 100, 'LENGTH': 40, 'TURNS': 2, 'RESULT': 20, 'GROUP': 2}
  sizes |= {'BATCH': 2, 'UPDATES': 1, 'STEPS': 1, 'EVAL_ROWS': 2}
  given = {
    'MODEL': model,
    'TRAIN': folder / 'a.jsonl',
    'EVAL': folder / 'a.jsonl',
    'SYSTEM': 'Use the calculator.',
    'TEMPLATE': '{prompt}',
  }
  done = front_door.run(
    '--gin_file=gin_configs/grpo_tools.gin',
    *(f'--gin.{k}={v}' for k, v in (given | sizes).items()),
    '--gin.train.train.plan=None',
    f'--workdir={tmp_path}/run',
  )
  assert done.returncode == 0, done.stderr
  rows = (tmp_path / 'run' / 'metrics.jsonl').read_text().splitlines()
  logged = set().union(*map(json.loads, rows))
  assert {'rollout/reward/tool_used', 'eval/reward/turns'} <= logged
