"""Files of examples and preferences: what is learned, and what is refused."""

import json
import pathlib

import jax
import numpy as np
import pytest

import llama_tokenizer
import own_data
from rlinf_jax.data import completions, supervised
from stages import base
from stages.language import huggingface, stops, tokens

USER = {'role': 'user', 'content': '1+1=?'}


@pytest.fixture(scope='module')
def model(tmp_path_factory):
  return own_data.model(tmp_path_factory.mktemp('model'))


def write(folder, *rows, name='rows.jsonl'):
  path = folder / name
  path.write_text('\n'.join(map(json.dumps, rows)))
  return str(path)


def reply(text):
  return {'role': 'assistant', 'content': text}


def source(make, model, path, **settings):
  defaults = {'batch_size': 2, 'prompt_length': 60, 'response_length': 12}
  return make(model, train=path, held_out=path, **{**defaults, **settings})


def first(make, model, path, **settings):
  made = source(make, model, path, **settings)
  return made.next(made.init(0), {})[1]


def texts(model, batch):
  """The text of each prompt, and that of its completion with its end."""
  tokenizer = tokens.load_tokenizer(model)
  prompts = tokens.decode(tokenizer, *batch.prompt)
  replies = [
    tokenizer.decode(row[keep > 0].tolist())
    for row, keep in zip(batch.action, batch.mask, strict=True)
  ]
  return list(zip(prompts, replies, strict=True))


ROWS = [
  {'prompt': '1+1=?', 'completion': '2'},
  {'prompt': [USER], 'completion': [reply('2')]},
  {'question': '1+1=?', 'answer': '2'},
  {'messages': [USER, reply('2')]},
  {'messages': [USER, reply('2')], 'answer': 'for a reward'},
  {'messages': [USER], 'answer': '2'},
]


@pytest.mark.parametrize('row', ROWS)
def test_an_example_is_a_prompt_and_its_reply_with_an_end(row, model, tmp_path):
  batch = first(supervised.examples, model, write(tmp_path, row))
  want = 'user:1+1=?;assistant:', f'2;{tokens.END}'
  assert texts(model, batch) == [want] * 2
  assert batch.prompt.mask.sum() == batch.prompt.mask[:, -21:].sum() == 42


def test_a_column_image_of_preferences_need_not_have_pictures(model, tmp_path):
  row = {'prompt': 'a', 'chosen': 'b', 'rejected': 'c', 'image': 'of a moon'}
  path = write(tmp_path, row)
  with pytest.raises(ValueError, match="bind image_column = ''"):
    first(supervised.preferences, model, path)
  batch = first(supervised.preferences, model, path, image_column='')
  assert [reply for _, reply in texts(model, batch)[:2]] == [
    f'{text};{tokens.END}' for text in 'bc'
  ]


def test_a_column_image_need_not_have_pictures(model, tmp_path):
  path = write(tmp_path, ROWS[0] | {'image': 'python:3.11'})
  with pytest.raises(ValueError, match="bind image_column = ''"):
    first(supervised.examples, model, path)
  batch = first(supervised.examples, model, path, image_column='')
  assert texts(model, batch)[0][0] == 'user:1+1=?;assistant:'


def test_without_a_chat_a_reply_follows_the_prompt(model, tmp_path):
  path = write(tmp_path, ROWS[0])
  batch = first(
    supervised.examples, model, path, chat=False, template='Q: {prompt} A:'
  )
  assert texts(model, batch) == [('Q: 1+1=? A:', f'2{tokens.END}')] * 2


def test_a_base_model_learns_the_text_as_it_is(tmp_path):
  """Llama's tokenizer begins a text by a token, and by a space."""
  tokenizer = llama_tokenizer.save(tmp_path)
  path = write(tmp_path, {'prompt': '2+2=', 'completion': '4'})
  batch = first(supervised.examples, str(tmp_path), path, chat=False)
  (prompt, completion), _ = texts(str(tmp_path), batch)
  assert prompt + completion == '2+2=4</s>'
  row = [
    *batch.prompt.token[0][batch.prompt.mask[0] > 0],
    *batch.action[0][batch.mask[0] > 0],
  ]
  assert row == [*tokenizer('2+2=4')['input_ids'], tokenizer.eos_token_id]


def test_a_completion_does_not_go_on_behind_an_end(model, tmp_path):
  text = f'2{tokens.END}user:3'
  path = write(tmp_path, {'prompt': '1+1=?', 'completion': text})
  for chat in True, False:
    with pytest.raises(ValueError, match=r'rows.jsonl.*goes on behind an end'):
      first(supervised.examples, model, path, chat=chat)


PAIRS = [
  {'prompt': '1+1=?', 'chosen': '2', 'rejected': '3'},
  {'prompt': [USER], 'chosen': [reply('2')], 'rejected': [reply('3')]},
  {'chosen': [USER, reply('2')], 'rejected': [USER, reply('3')]},
  {'prompt': 'x', 'chosen': [USER, reply('2')], 'rejected': [USER, reply('3')]},
]  # fmt: skip


@pytest.mark.parametrize('row', PAIRS)
def test_a_pair_is_two_adjacent_rows_the_chosen_one_first(row, model, tmp_path):
  batch = first(supervised.preferences, model, write(tmp_path, row))
  prompt = 'user:1+1=?;assistant:'
  pair = (prompt, f'2;{tokens.END}'), (prompt, f'3;{tokens.END}')
  assert texts(model, batch) == [*pair] * 2


def test_batches_give_every_row_once_an_epoch_and_resume(model, tmp_path):
  rows = [{'prompt': f'{i}', 'completion': 'x'} for i in range(6)]
  path = write(tmp_path, *rows)
  made = source(supervised.examples, model, path, chat=False)
  state, seen = made.init(1), []
  for i in range(6):
    if i == 3:
      resumed = state
    state, batch = made.next(state, {})
    seen.append([prompt for prompt, _ in texts(model, batch)])
  assert (
    sorted(sum(seen[:3], [])) == sorted(sum(seen[3:], [])) == list('012345')
  )
  _, again = source(supervised.examples, model, path, chat=False).next(
    resumed, {}
  )
  assert [prompt for prompt, _ in texts(model, again)] == seen[3]


def test_the_last_held_out_batch_is_filled_with_rows_that_do_not_count(
  model, tmp_path
):
  rows = [{**PAIRS[0], 'prompt': f'{i}+1=?'} for i in range(5)]
  path = write(tmp_path, *rows)
  made = source(supervised.preferences, model, path, held_out_batch=3)
  held = made.held_out()
  assert [len(batch.mask) for batch in held] == [6, 6]
  counted = [(batch.mask.max(1) > 0).tolist() for batch in held]
  assert counted == [[True] * 6, [True] * 4 + [False] * 2]
  assert all(batch.prompt.mask.sum(1).min() > 0 for batch in held)


def test_long_rows_are_left_out_and_counted(model, tmp_path, capsys):
  rows = [ROWS[0], {'prompt': 'short', 'completion': 'x' * 30}]
  path = write(tmp_path, *rows)
  batch = first(supervised.examples, model, path, drop_long=True)
  assert all(answer.startswith('2') for _, answer in texts(model, batch))
  assert 'rows.jsonl: 1 rows, 1 over the limits' in capsys.readouterr().out
  with pytest.raises(ValueError, match='line 2 has a prompt of .* raise'):
    first(supervised.examples, model, path)
  with pytest.raises(ValueError, match='All 2 rows of rows.jsonl'):
    first(supervised.examples, model, path, drop_long=True, response_length=1)


BAD = [
  ({'prompt': 'x'}, 'no column .*`completion`'),
  ({'text': 'x', 'completion': 'y'}, 'no column'),
  ({'prompt': 'x', 'completion': ''}, "no completion in 'completion'"),
  ({'prompt': 'x', 'completion': 3}, "no completion in 'completion'"),
  ({'prompt': '', 'completion': 'y'}, "no question in 'prompt'"),
  ({'messages': [USER]}, 'end it with the reply of the assistant'),
  ({'messages': [reply('2')]}, 'no question before the reply'),
  ({'messages': [reply('1'), reply('2')]}, 'leaves nothing to answer'),
  ({'messages': [{'text': 'x'}]}, 'a message is'),
  ({'prompt': 'x', 'completion': '\ud800'}, 'half of a character'),
]


@pytest.mark.parametrize('row, message', BAD)
def test_a_bad_example_ends_in_a_sentence(row, message, tmp_path):
  with pytest.raises(ValueError, match=message) as error:
    completions.read_examples(write(tmp_path, row))
  assert 'rows.jsonl line 1' in str(error.value)


BAD_PAIRS = [
  ({'prompt': 'x', 'chosen': 'y'}, 'no column `rejected`'),
  ({'chosen': 'x', 'rejected': 'y'}, 'bind prompt_column'),
  (
    {
      'chosen': [USER, reply('2')],
      'rejected': [{**USER, 'content': 'else'}, reply('3')],
    },
    'differ before their last messages',
  ),
]


@pytest.mark.parametrize('row, message', BAD_PAIRS)
def test_a_bad_pair_ends_in_a_sentence(row, message, tmp_path):
  with pytest.raises(ValueError, match=message):
    completions.read_preferences(write(tmp_path, row))


def test_a_template_that_rewrites_questions_is_refused(model, tmp_path):
  tokenizer = tokens.load_tokenizer(model)
  usual = tokenizer.chat_template
  tokenizer.chat_template = '{{ messages | length }}'
  try:
    with pytest.raises(ValueError, match='writes the question of'):
      first(supervised.examples, model, write(tmp_path, ROWS[0]))
  finally:
    tokenizer.chat_template = usual


def test_completions_have_an_end_once():
  assert completions._ended([5, 6], (9, 8), 'a row') == [5, 6, 9]
  assert completions._ended([5, 8], (9, 8), 'a row') == [5, 8]


def test_sampling_stops_at_the_end_that_examples_teach(tmp_path):
  # As in models whose tokenizer ends a turn, while config.json ends a text.
  folder = own_data.model(tmp_path / 'model')
  config = pathlib.Path(folder) / 'config.json'
  config.write_text(
    json.dumps(json.loads(config.read_text()) | {'eos_token_id': 7})
  )
  end = tokens.load_tokenizer(folder).eos_token_id
  assert end != 7 and stops.stop_tokens(folder) == (end, 7)

  row = write(tmp_path, {'prompt': 'a', 'completion': 'x'})
  batch = first(supervised.examples, folder, row)
  assert (batch.action[0][batch.mask[0] > 0]).tolist()[-1] == end

  policy = huggingface.policy(folder, response_length=64)
  prompt = base.Prompt(*(np.ones((16, 3), np.int32),) * 2)
  keys = jax.random.split(jax.random.key(0), 16)
  x = jax.jit(policy.act)(policy.init(keys[0]), prompt, keys)
  action, mask = np.asarray(x.action), np.asarray(x.mask)
  for stop in (end, 7):
    is_stop = action[:, :-1] == stop
    assert is_stop.any() and not mask[:, 1:][is_stop].any()


def test_mixtures_and_dtypes_are_those_of_questions(model, tmp_path):
  one = write(tmp_path, {'prompt': 'a', 'completion': 'x'}, name='one.jsonl')
  two = write(tmp_path, {'prompt': 'b', 'completion': 'x'}, name='two.csv')
  (tmp_path / 'two.csv').write_text('prompt,completion\nb,x\n')
  made = supervised.examples(
    model,
    train={one: 3, two: 1},
    held_out=one,
    batch_size=8,
    prompt_length=60,
    response_length=4,
    chat=False,
  )
  batch = made.next(made.init(0), {})[1]
  prompts = [prompt for prompt, _ in texts(model, batch)]
  assert sorted(prompts) == ['a'] * 6 + ['b'] * 2
  assert batch.action.dtype == np.int32 and batch.mask.dtype == np.float32
