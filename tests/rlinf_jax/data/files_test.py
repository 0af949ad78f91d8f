"""Files of questions are read, or refused by their line."""

import json
import math
import pathlib

import pytest

from rlinf_jax.data import files
from tests.rlinf_jax.data import questions_test


def test_formats_give_the_same_rows(tmp_path):
  jsonl = questions_test.write(
    tmp_path / 'a.jsonl', [{'prompt': 'a, "b"', 'answer': 7}]
  )
  table = tmp_path / 'a.csv'
  table.write_text('prompt,answer\n"a, ""b""",7\n')
  for path in jsonl, str(table):
    (read,) = files.read(path)
    assert (read.prompt, read.answer) == ('a, "b"', '7')


def test_a_parquet_file_is_read_or_names_what_it_needs(tmp_path):
  path = tmp_path / 'a.parquet'
  try:
    import pyarrow
    from pyarrow import parquet
  except ImportError:
    path.write_bytes(b'')
    with pytest.raises(ImportError, match=r'rlinf-jax\[parquet\]'):
      files.read(str(path))
    return
  table = pyarrow.table({'problem': ['a'], 'answer': ['7']})
  parquet.write_table(table, path)
  assert files.read(str(path))[0][:2] == ('a', '7')
  for answer, message in (b'7', 'row 1 has a bytes'), (math.nan, 'no answer'):
    table = pyarrow.table({'problem': ['a'], 'answer': [answer]})
    parquet.write_table(table, path)
    with pytest.raises(ValueError, match=message):
      files.read(str(path))
  path.write_bytes(path.read_bytes()[:-8])
  with pytest.raises(ValueError, match='a.parquet cannot be read as parquet'):
    files.read(str(path))


def test_an_answer_that_is_an_object_reaches_rewards_as_json(tmp_path):
  """Whole, also where a text in it has the marker of final answers."""
  path = tmp_path / 'a.jsonl'
  answer = {'tests': ['f(1) #### 2', 'f(2)'], 'level': 3}
  path.write_text(json.dumps({'prompt': 'Write f.', 'answer': answer}) + '\n')
  (row,) = files.read(str(path))
  assert json.loads(row.answer) == answer


def test_a_field_that_is_too_long_for_csv_names_its_line(tmp_path):
  path = tmp_path / 'a.csv'
  path.write_text(f'prompt,answer\na,1\n{"a" * 200_000},2\n')
  with pytest.raises(ValueError, match='a.csv line 3 cannot be read as CSV'):
    files.read(str(path))


def test_a_column_that_a_csv_file_names_twice_is_refused(tmp_path):
  path = tmp_path / 'a.csv'
  path.write_text('prompt,answer,note,answer\na,1,x,2\n')
  with pytest.raises(ValueError, match=r'line 1 names the columns `answer` mo'):
    files.read(str(path))


BAD_FILES = [
  ('', 'has no rows'),
  ('\n\n', 'has no rows'),
  ('{"prompt": "a", "answer": "1"}\n\n{"prompt": "b"}', 'line 3 has no answer'),
  ('{"prompt": "a", "answer": null}', 'line 1 has no answer'),
  ('{"prompt": "a", "answer": "x ####"}', 'line 1 has nothing in'),
  ('{"prompt": "a", "solution": "1"}', "no column 'answer'.*`solution`"),
  ('{"ask": "a", "answer": "1"}', 'none of the columns.*`ask`, `answer`'),
  ('{"prompt": " ", "answer": "1"}', 'line 1 has no question'),
  ('{"prompt": "a"', 'line 1 is not JSON'),
  ('[' * 100_000, 'line 1 is not JSON'),
  (
    '{"prompt": "a", "answer": 1' + '0' * 5000 + '}',
    r'bad.jsonl line 1 is not JSON \(Exceeds the limit',
  ),
  ('{"prompt": "a", "answer": NaN}', 'line 1 has no answer'),
  ('[1]', 'line 1 is not a JSON object'),
  ('{"prompt": "\\ud800", "answer": "1"}', 'line 1 has half of a character'),
  ('{"messages": [{"role": "me"}], "answer": "1"}', 'a message is'),
  (
    '{"messages": [{"role": "assistant", "content": "a"}], "answer": "1"}',
    'ends with a message of the assistant',
  ),
]


@pytest.mark.parametrize('text, message', BAD_FILES)
def test_a_bad_file_is_refused_in_a_sentence(tmp_path, text, message):
  path = tmp_path / 'bad.jsonl'
  path.write_text(text)
  with pytest.raises(ValueError, match=message):
    files.read(str(path))


@pytest.mark.parametrize(
  'path, error, message',
  [
    ('nowhere.jsonl', FileNotFoundError, 'no file nowhere.jsonl'),
    ('$NO_SUCH_FOLDER/a.jsonl', ValueError, 'variable that is not set'),
    ('a.xlsx', ValueError, "ends in '.xlsx'"),
  ],
)
def test_a_file_that_cannot_be_is_refused(
  tmp_path, monkeypatch, path, error, message
):
  monkeypatch.chdir(tmp_path)
  pathlib.Path('a.xlsx').touch()
  with pytest.raises(error, match=message):
    files.read(path)
