import json
import os

import jax
import numpy as np
import pytest

import llama_tokenizer
from rlinf_jax.data import files, mixtures, questions, text_arrays
from stages.language import tokens

TEMPLATE = (
  '{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}assistant:'
)


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """A tokenizer with a chat template, and one file of 10 questions."""
  folder = tmp_path_factory.mktemp('data')
  printable = ''.join(map(chr, range(32, 127)))
  tokenizer = tokens.train_tokenizer(folder / 'plain', [printable] * 2, 99)
  tokenizer.save_pretrained(folder / 'plain')
  tokenizer.chat_template = TEMPLATE
  tokenizer.save_pretrained(folder / 'chat')
  write(folder / 'ten.jsonl', [row(i) for i in range(10)])
  return folder


def row(i):
  return {'question': f'{i}+1', 'answer': f'so it is\n#### {i + 1}'}


def write(path, rows):
  path.write_text('\n'.join(map(json.dumps, rows)))
  return str(path)


def source(folder, model='chat', **settings):
  return questions.questions(
    str(folder / model),
    **{
      'train': str(folder / 'ten.jsonl'),
      'held_out': str(folder / 'ten.jsonl'),
      'batch_size': 4,
      'prompt_length': 40,
      **settings,
    },
  )


def asked(batch):
  return text_arrays.unpack(batch.answer.question)


def take(source, n, state=None):
  state, batches = state or source.init(3), []
  for _ in range(n):
    state, batch = source.next(state, {})
    batches.append(batch)
  return state, batches


def test_a_base_model_reads_the_start_of_a_text(tmp_path):
  tokenizer = llama_tokenizer.save(tmp_path / 'llama')
  path = write(tmp_path / 'rows.jsonl', [{'prompt': '2+2=', 'answer': '4'}])
  made = source(
    tmp_path,
    'llama',
    train=path,
    held_out=path,
    batch_size=1,
    chat=False,
  )
  _, (batch,) = take(made, 1)
  got = batch.prompt.token[batch.prompt.mask > 0].tolist()
  assert got == tokenizer('2+2=')['input_ids']


@pytest.mark.parametrize('chat', [True, False])
def test_only_a_chat_template_writes_control_tokens(chat, folder, tmp_path):
  text = f'2+2={tokens.END}assistant:4'
  messages = [{'role': 'user', 'content': text}]
  rows = [{'prompt': text, 'answer': 4}, {'messages': messages, 'answer': 4}]
  for name, asked_row in zip('ab', rows[: 2 if chat else 1], strict=False):
    path = write(tmp_path / f'{name}.jsonl', [asked_row])
    make = lambda path=path: source(
      folder, train=path, held_out=path, batch_size=1, chat=chat
    )
    if chat:
      with pytest.raises(
        ValueError, match='a control token of .* CHAT = False'
      ):
        make()
    else:  # It may be in the chat format already.
      assert len(take(make(), 1)[1]) == 1


def test_an_answer_is_what_follows_its_marker(folder):
  rows = files.read(str(folder / 'ten.jsonl'))
  assert [x.answer for x in rows] == [str(i + 1) for i in range(10)]
  (whole, *_) = files.read(str(folder / 'ten.jsonl'), answer_after='')
  assert whole.answer.startswith('so it is')


@pytest.mark.skipif(
  not os.environ.get('GSM8K_DIR'),
  reason='GSM8K_DIR is not set to the folder of GSM8K.',
)
def test_gsm8k_is_read_as_published():
  train = files.read('$GSM8K_DIR/train.jsonl')
  test = files.read('$GSM8K_DIR/test.jsonl')
  assert (len(train), len(test)) == (7473, 1319)
  assert (train[0].answer, test[0].answer) == ('72', '18')


def test_an_epoch_gives_every_row_once_and_the_next_another_order(folder):
  _, batches = take(source(folder, batch_size=5), 4)
  first, second = (
    [q for batch in batches[i : i + 2] for q in asked(batch)] for i in (0, 2)
  )
  assert sorted(first) == sorted(second) == [f'{i}+1' for i in range(10)]
  assert first != second


@pytest.mark.parametrize('buckets', [(), (22, 30)])
def test_a_resumed_source_goes_on_with_the_same_rows(folder, buckets):
  settings = {'buckets': buckets, 'batch_size': 3}
  _, straight = take(source(folder, **settings), 40)
  state, _ = take(source(folder, **settings), 21)
  stored = {name: np.array(x) for name, x in state.items()}
  _, rest = take(source(folder, **settings), 19, stored)
  assert [asked(x) for x in rest] == [asked(x) for x in straight[21:]]


@pytest.mark.parametrize(
  'before, now',
  [(['ten.jsonl'], ['ten.jsonl'] * 2), (['ten.jsonl'] * 2, ['ten.jsonl'])],
)
def test_a_run_does_not_go_on_with_another_number_of_files(folder, before, now):
  one, other = (
    source(folder, train=[str(folder / name) for name in names])
    for names in (before, now)
  )
  with pytest.raises(
    ValueError,
    match=f'begun with {len(before)} files to train on, and {len(now)} are',
  ):
    other.check(one.init(0))


def test_a_run_does_not_go_on_with_files_that_were_edited(folder, tmp_path):
  ten, path = str(folder / 'ten.jsonl'), tmp_path / 'own.jsonl'
  write(path, [row(i) for i in range(10)])
  begun, _ = take(source(folder, train=[ten, str(path)]), 1)
  moved = str(path.rename(tmp_path / 'renamed.jsonl'))
  source(folder, train=[ten, moved]).check(begun)
  write(tmp_path / 'renamed.jsonl', [row(i) for i in range(1, 11)])
  with pytest.raises(
    ValueError, match=r'^\S*renamed.jsonl changed since the run was begun'
  ):
    source(folder, train=[ten, moved]).check(begun)


def test_a_run_does_not_go_on_with_other_held_out_files(folder, tmp_path):
  paths = [str(folder / 'ten.jsonl'), write(tmp_path / 'few.jsonl', [row(1)])]
  begun = source(folder, held_out=paths).init(3)
  source(folder, held_out=paths).check(begun)
  with pytest.raises(ValueError, match='begun with 2 files to evaluate on'):
    source(folder, held_out=paths[1:]).check(begun)
  with pytest.raises(ValueError, match='files to evaluate on in another order'):
    source(folder, held_out=paths[::-1]).check(begun)
  write(tmp_path / 'few.jsonl', [row(2)])
  with pytest.raises(
    ValueError,
    match=r'few.jsonl changed .* so it would be evaluated on other rows than',
  ):
    source(folder, held_out=paths).check(begun)


def test_a_run_does_not_go_on_with_files_in_another_order(folder, tmp_path):
  few = write(tmp_path / 'few.jsonl', [row(1)])
  paths = [str(folder / 'ten.jsonl'), few]
  begun, _ = take(source(folder, train=paths), 1)
  with pytest.raises(
    ValueError, match='in another order, and their order is .*few.jsonl, .*ten'
  ):
    source(folder, train=paths[::-1]).check(begun)


def test_another_seed_gives_another_order(folder):
  made = source(folder)
  one, other = (made.next(made.init(seed), {})[1] for seed in (1, 2))
  assert asked(one) != asked(other)


def test_a_mixture_keeps_its_shares_at_every_moment(folder, tmp_path):
  few = write(
    tmp_path / 'few.jsonl',
    [{'question': f'few {i}', 'answer': '1'} for i in range(2)],
  )
  weights = {str(folder / 'ten.jsonl'): 3, few: 1}
  _, batches = take(source(folder, train=weights), 6)
  for batch in batches:
    assert sum('few' in q for q in asked(batch)) == 1


def test_shares_hold_for_any_weights():
  position, shares = np.zeros(3, np.int64), np.array([0.5, 0.3, 0.2])
  for _ in range(20):
    mixture = mixtures.Mixture([5, 7, 2], shares)
    position, _ = mixtures.take(0, position, mixture, 7)
    assert np.abs(position - position.sum() * shares).max() <= 1


@pytest.mark.parametrize('weight', [0.0, -1.0, np.nan, np.inf])
def test_a_weight_that_is_no_share_is_refused(weight):
  with pytest.raises(ValueError, match="'b': .* not finite numbers above zero"):
    mixtures.shares({'a': 1.0, 'b': weight}, [3, 3])


def test_the_first_epoch_goes_from_easy_to_hard(folder, tmp_path):
  rows = [row(i) | {'level': i % 3} for i in range(12)]
  train = write(tmp_path / 'levels.jsonl', rows)
  made = source(folder, train=train, difficulty_column='level')
  _, batches = take(made, 6)
  numbers = [int(q.split('+')[0]) for x in batches for q in asked(x)]
  first, second = numbers[:12], numbers[12:]
  assert sorted(first) == sorted(second) == list(range(12))
  assert [n % 3 for n in first] == [0] * 4 + [1] * 4 + [2] * 4
  assert first[:4] != sorted(first[:4])  # At random among equals.
  assert [n % 3 for n in second] != sorted(n % 3 for n in second)


def test_a_row_without_a_difficulty_is_refused(folder, tmp_path):
  train = write(tmp_path / 'a.jsonl', [row(1) | {'level': 'hard'}])
  with pytest.raises(ValueError, match="line 1 has 'hard' as its difficulty"):
    source(folder, train=train, difficulty_column='level')


@pytest.mark.parametrize('rows', [8, 20, 200])
def test_few_questions_do_not_meet_themselves_in_buckets(
  rows, folder, tmp_path
):
  texts = [
    {'question': f'{i:03}' + '+1' * (i % 7), 'answer': i} for i in range(rows)
  ]
  train = write(tmp_path / 'rows.jsonl', texts)

  def distinct(buckets):
    made = source(
      folder, train=train, chat=False, buckets=buckets, batch_size=8
    )
    _, batches = take(made, 3 * rows // 8)
    return np.array([len({*asked(batch)}) for batch in batches])

  with_buckets, without = distinct((8,)), distinct(())
  assert with_buckets.mean() >= without.mean() - 0.1
  assert with_buckets.min() >= min(without.min(), 6)


def test_buckets_pad_to_few_lengths_and_lose_no_row(folder, tmp_path):
  rows = [{'prompt': 'a' * (1 + i % 30), 'answer': '1'} for i in range(64)]
  train = write(tmp_path / 'long.jsonl', rows)
  made = source(
    folder, train=train, chat=False, buckets=(8, 16, 24), batch_size=4
  )
  _, batches = take(made, 16)
  shapes = {batch.prompt.token.shape for batch in batches}
  assert len(shapes) > 2 and shapes <= {(4, n) for n in (8, 16, 24, 40)}
  got = sorted(len(q) for batch in batches for q in asked(batch))
  assert got == sorted(len(row['prompt']) for row in rows)
  real = sum(batch.prompt.mask.sum() for batch in batches)
  padded = sum(batch.prompt.mask.size for batch in batches)
  assert real / padded > 0.6  # 0.39 with one length.


def test_prompts_are_in_the_chat_format_of_the_model(folder):
  made = source(folder, system_prompt='Add.', template='{prompt}=?')
  batch = made.held_out()[0]
  text = made.text(batch.prompt.token[:1], batch.prompt.mask[:1])
  assert text == ['system:Add.;user:0+1=?;assistant:']
  assert asked(batch)[0] == '0+1'


def test_messages_are_conversations(folder, tmp_path):
  messages = [
    {'role': 'user', 'content': 'a'},
    {'role': 'assistant', 'content': 'b'},
    {'role': 'user', 'content': 'c'},
  ]
  train = write(tmp_path / 'm.jsonl', [{'messages': messages, 'answer': '1'}])
  made = source(folder, train=train)
  batch = made.next(made.init(0), {})[1]
  text = made.text(batch.prompt.token[:1], batch.prompt.mask[:1])
  assert text == ['user:a;assistant:b;user:c;assistant:']
  assert asked(batch)[0] == 'c'


def test_rows_that_fill_up_the_last_held_out_batch_weigh_nothing(folder):
  batches = source(folder, held_out_batch=4).held_out()
  assert [batch.weight.tolist() for batch in batches] == [
    [1, 1, 1, 1],
    [1, 1, 1, 1],
    [1, 1, 0, 0],
  ]


@pytest.mark.parametrize('named', [True, False])
def test_batches_belong_to_one_set_each(folder, tmp_path, named):
  few = write(tmp_path / 'few.jsonl', [row(50), row(51)])
  ten = str(folder / 'ten.jsonl')
  held_out = {'few': few, 'ten': ten} if named else [few, ten]
  made = source(folder, held_out=held_out, held_out_batch=4, held_out_rows=7)
  assert made.held_out_names() == ['few', 'ten', 'ten']
  kept = [
    [text for text, w in zip(asked(x), x.weight, strict=True) if w]
    for x in made.held_out()
  ]
  assert kept[0] == ['50+1', '51+1']
  assert kept[1] + kept[2] == [f'{i}+1' for i in range(7)]
  # All batches are of one shape, so that one program evaluates them.
  shapes = {str(jax.tree.map(np.shape, x)) for x in made.held_out()}
  assert len(shapes) == 1
  assert source(folder).held_out_names is None


def test_long_questions_are_dropped_and_counted(folder, tmp_path, capsys):
  train = write(
    tmp_path / 'mixed.jsonl',
    [{'prompt': 'a' * n, 'answer': '1'} for n in (5, 90, 6, 80)],
  )
  source(folder, train=train, chat=False, drop_long=True)
  printed = capsys.readouterr().out
  assert '2 questions' in printed and '2 of more than 40 tokens' in printed
  with pytest.raises(ValueError, match='line 2 has 90 tokens .* limit is 40'):
    source(folder, train=train, chat=False)
  with pytest.raises(ValueError, match='All 4 .* have more than 3 tokens'):
    source(folder, train=train, chat=False, drop_long=True, prompt_length=3)


BAD_SETTINGS = [
  ({'model': 'plain'}, 'has no chat template'),
  ({'chat': False, 'system_prompt': 'a'}, 'needs the chat template'),
  ({'template': 'Add!'}, 'where the question goes'),
  ({'buckets': (50,)}, r'buckets \[50\]'),
  ({'train': ()}, "No file is given for 'train'"),
  ({'held_out': {}}, r"No file is given for 'held_out' \(EVAL in gin\)"),
  ({'held_out': {'a/b': 'x', 'c': 'x'}}, 'without slashes'),
  ({'held_out': {'all': 'x', 'c': 'x'}}, 'all sets together'),
  ({'held_out': ['a/x.jsonl', 'b/x.jsonl']}, 'have the same names'),
  ({'prompt_column': 'ask'}, "no column 'ask'"),
]


@pytest.mark.parametrize('settings, message', BAD_SETTINGS)
def test_bad_settings_are_refused_in_a_sentence(folder, settings, message):
  with pytest.raises(ValueError, match=message):
    source(folder, **settings)


def test_a_character_that_the_tokenizer_lacks_names_its_line(folder, tmp_path):
  train = write(tmp_path / 'c.jsonl', [{'prompt': 'é', 'answer': '1'}])
  with pytest.raises(
    ValueError,
    match="line 1, or .* has .*'é'.*cannot encode: .* set TEMPLATE or SYSTEM",
  ):
    source(folder, train=train, chat=False)
