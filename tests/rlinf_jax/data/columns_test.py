"""Columns of a file that reach rewards besides questions and answers."""

import json

import hypothesis
from hypothesis import strategies
import numpy as np
import pytest

import rewards_of_mine
from rlinf_jax.agents import problems, tool_env
from rlinf_jax.data import files, prompts, questions, text_arrays
from rlinf_jax.rewards import base, pool, verifier
from stages.language import tokens

# Also halves of characters, numbers beyond any float, and NaN.
VALUES = strategies.recursive(
  strategies.none()
  | strategies.booleans()
  | strategies.integers()
  | strategies.floats()
  | strategies.text(),
  lambda x: strategies.lists(x) | strategies.dictionaries(strategies.text(), x),
  max_leaves=8,
)


@pytest.fixture(scope='module')
def model(tmp_path_factory):
  folder = tmp_path_factory.mktemp('model')
  printable = ''.join(map(chr, range(32, 127)))
  tokens.train_tokenizer(folder, [printable] * 2, 99)
  return str(folder)


def write(path, rows):
  path.write_text('\n'.join(map(json.dumps, rows)))
  return str(path)


def read(path, rows, columns):
  return files.read(write(path / 'a.jsonl', rows), columns=columns)


def seen(model, reference, rows: int) -> list[base.Completion]:
  """The completions that a reward is called with."""
  completions = []

  def mine(completion):
    completions.append(completion)
    return 0.0

  stage = verifier.verify(model, rewards=[mine])
  row = tokens.encode_completions(tokens.load_tokenizer(model), ['a'] * rows, 4)
  stage(reference, *row)
  return completions


@hypothesis.settings(
  deadline=None,
  derandomize=True,
  max_examples=40,
  suppress_health_check=list(hypothesis.HealthCheck),
)
@hypothesis.given(
  strategies.lists(strategies.tuples(VALUES, VALUES), min_size=1, max_size=3)
)
def test_what_is_in_the_file_arrives(model, tmp_path, values):
  rows = [
    {'prompt': 'a', 'answer': '1', 'x': x, 'other': 0, '': y} for x, y in values
  ]
  references = prompts.references(read(tmp_path, rows, ('x', '')))
  index = np.arange(len(rows))
  reference = text_arrays.Reference(*(part[index] for part in references))
  for completion, (x, y) in zip(
    seen(model, reference, len(rows)), values, strict=True
  ):
    # By its text, as NaN differs from itself and 1 does not from True.
    assert repr(dict(completion.columns)) == repr({'x': x, '': y})
    assert (completion.question, completion.answer) == ('a', '1')


def test_columns_travel_with_their_rows_of_all_files(model, tmp_path):
  row = lambda i: {'prompt': f'{i}?', 'answer': str(i), 'level': i}
  few = write(tmp_path / 'few.jsonl', map(row, range(3)))
  more = write(tmp_path / 'more.jsonl', map(row, range(3, 9)))
  source = questions.questions(
    model,
    train=[few, more],
    held_out=few,
    batch_size=9,
    prompt_length=8,
    chat=False,
    columns=['level', 'prompt', 'answer'],
  )
  _, batch = source.next(source.init(0), {})
  (held_out,) = source.held_out()
  for problem, levels in (batch, range(9)), (held_out, range(3)):
    got = seen(model, problem.answer, len(levels))
    assert sorted(x.columns['level'] for x in got) == [*levels]
    for x in got:
      assert x.columns == row(int(x.answer)) and x.question == f'{x.answer}?'


def test_csv_gives_texts_and_parquet_its_types(tmp_path):
  (tmp_path / 'a.csv').write_text('prompt,answer,level\na,1,2\n')
  (row,) = files.read(str(tmp_path / 'a.csv'), columns='level')
  assert json.loads(row.columns) == {'level': '2'}
  parquet = pytest.importorskip('pyarrow.parquet')
  import pyarrow

  values = {'level': 2, 'tests': ['a', 'b'], 'more': {'x': [1.5]}, 'none': None}
  table = {'prompt': 'a', 'answer': '1', **values, 'raw': b'x'}
  path = tmp_path / 'a.parquet'
  parquet.write_table(pyarrow.Table.from_pylist([table]), path)
  (row,) = files.read(str(path), columns=[*values])
  assert json.loads(row.columns) == values
  with pytest.raises(ValueError, match="row 1 has a bytes in 'raw'"):
    files.read(str(path), columns='raw')


@pytest.mark.parametrize(
  'columns, message',
  [
    (
      'tests',
      r"line 1 has no column 'tests'; its columns are `prompt`, `answer`, "
      r'`level`: bind columns \(COLUMNS in gin\)',
    ),
    (['level'], "line 2 has no column 'level'"),
    (['answer', 'prompt', 'answer'], 'has a name twice'),
  ],
)
def test_a_column_that_cannot_be_seen_is_refused(tmp_path, columns, message):
  rows = [{'prompt': 'a', 'answer': '1', 'level': 2}]
  rows.append({'prompt': 'a', 'answer': '1'})
  with pytest.raises(ValueError, match=message):
    read(tmp_path, rows, columns)


def reference_of(columns: str | None):
  packed = text_arrays.pack(['1'])
  columns = columns and text_arrays.pack([columns])
  return text_arrays.Reference(packed, packed, columns)


@pytest.mark.parametrize('isolated', [False, True])
def test_a_reward_that_reads_another_column_says_to_name_it(
  model, isolated, capsys
):
  reward = rewards_of_mine.level
  if isolated:
    reward = pool.isolated(reward, processes=1)
  stage = verifier.verify(model, rewards=[reward])
  rows = tokens.encode_completions(tokens.load_tokenizer(model), ['a'], 4)
  verdict = stage(reference_of('{"level": 2}'), *rows)
  assert verdict.reward.tolist() == [2] and verdict.terms['failed'] == [0]
  assert not capsys.readouterr().out
  verdict = stage(reference_of('{"tests": []}'), *rows)
  assert verdict.reward.tolist() == [0] and verdict.terms['failed'] == [1]
  said = capsys.readouterr().out
  assert "reads the column 'level', and" in said
  assert 'rewards see are `tests`: name it in `columns`' in said


def test_without_names_there_are_no_columns(model, tmp_path):
  (row,) = read(tmp_path, [{'prompt': 'a', 'answer': '1'}], ())
  assert prompts.references([row]).columns is None
  (completion,) = seen(model, reference_of(None), 1)
  assert completion.columns == {} and completion.columns.get('x') is None
  with pytest.raises(KeyError, match='rewards see are none: name it'):
    completion.columns['x']


def text_within(text: str, answer: str, columns: base.Columns) -> float:
  return float(text == answer and len(text) <= columns['most'])


def test_a_text_environment_gets_the_columns_of_a_question(tmp_path):
  rows = [{'prompt': 'a', 'answer': '12', 'most': n} for n in (1, 2)]
  make = lambda: tool_env.ToolEnv([], grade=text_within)
  opening = problems.opening(make)
  questions = read(tmp_path, rows, 'most')
  texts = opening.references(questions)[np.arange(2)]
  scores = []
  for problem in map(json.loads, text_arrays.unpack(texts)):
    env = make()
    env.reset(problem)
    scores.append(env.step('12').reward)
  assert scores == [0, 1]


@pytest.mark.parametrize(
  'grade, columns', [(text_within, ()), (tool_env.same_text, 'most')]
)
def test_a_grade_that_does_not_take_the_columns_is_refused(
  tmp_path, grade, columns
):
  rows = read(tmp_path, [{'prompt': 'a', 'answer': '1', 'most': 1}], columns)
  opening = problems.opening(lambda: tool_env.ToolEnv([], grade=grade))
  given = r'\(text, answer, columns\)' if columns else r'\(text, answer\)'
  with pytest.raises(
    ValueError, match=f'grade {grade.__name__}.* cannot be called with {given}'
  ):
    opening.texts(
      None, rows, chat=False, system_prompt=None, template='{prompt}'
    )
