"""Files of questions with answers: JSON lines, CSV and parquet."""

from collections.abc import Iterable, Iterator, Sequence
import csv
import functools
import json
import math
import os
import pathlib
from typing import Any, NamedTuple

import numpy as np

from rlinf_jax.config import suggestions
from rlinf_jax.data import json_lines, pictures
from stages import source_files

# Columns that may hold the question, the first that a file has.
PROMPT_COLUMNS = ('prompt', 'question', 'messages', 'problem')
ROLES = ('system', 'user', 'assistant')
Message = pictures.Message  # Its 'role' and its 'content'.


class Row(NamedTuple):
  """A question with its answer.

  Attributes:
    prompt: the question, or the messages of a conversation so far, with a place
      for each picture, see `pictures.attach`.
    answer: what a reward is given to compare with.
    where: file and line, for messages.
    difficulty: a number that is higher for harder questions; None without
      a column of it.
    images: its pictures.
    columns: JSON of the columns that rewards see besides, by name; empty
      without any.
  """

  prompt: str | tuple[Message, ...]
  answer: str
  where: str
  difficulty: float | None = None
  images: tuple[pictures.Image, ...] = ()
  columns: str = ''

  @property
  def question(self) -> str:
    """The text of the question; of a conversation, its last message."""
    if not isinstance(self.prompt, str):
      return pictures.text_of(self.prompt[-1]['content'])
    return pictures.text_of(self.prompt) if self.images else self.prompt


def read(
  path: str,
  *,
  prompt_column: str | None = None,
  answer_column: str = 'answer',
  answer_after: str = '####',
  difficulty_column: str | None = None,
  image_column: str | None = None,
  columns: str | Sequence[str] = (),
) -> list[Row]:
  """Reads the rows of a file, whose ending tells its format.

  Args:
    path: a file that ends in .jsonl, .csv or .parquet; `~` and environment
      variables such as `$GSM8K_DIR` are expanded.
    prompt_column: the column of questions; by default, the first of
      `PROMPT_COLUMNS` that the file has.
    answer_column: the column of answers. An answer that is not text, such as a
      list, is handed to rewards as JSON.
    answer_after: where this marker is in the text of an answer, the answer is
      what follows its last occurrence, as in GSM8K, whose answers show their
      working.
    difficulty_column: the column of numbers that are higher for harder
      questions, such as a level; None if there is none.
    image_column: the column of pictures; by default, the first of
      `pictures.COLUMNS` that the file has, if any; '' for none.
    columns: the column that rewards see besides, or several; those of questions
      and answers may be among them.

  Raises:
    ImportError: for a parquet file without pyarrow.
    OSError: if the file cannot be read.
    ValueError: for an empty file, a missing column, one in `columns` twice, a
      value that JSON cannot hold, or a row without a question or an answer;
      names the line.
  """
  columns = _names(columns)
  rows = []
  for where, row in records(path):
    if not rows:
      prompt_column = _find_columns(row, prompt_column, answer_column, where)
    prompt = checked_prompt(row.get(prompt_column), prompt_column, where)
    value = row.get(answer_column)
    answer = _answer(value, answer_column, where)
    if answer_after and isinstance(value, str):  # Not within JSON.
      answer = answer.rpartition(answer_after)[2]
    answer = answer.strip()
    if not answer:
      raise ValueError(
        f'{where} has nothing in {answer_column!r}: give it an answer, or '
        'leave the row out.'
      )
    difficulty = _difficulty(row, difficulty_column, where)
    prompt, images = pictures.attach(
      prompt, row, expand(path).parent, where, image_column
    )
    seen = _seen(row, columns, where)
    rows.append(Row(prompt, answer, where, difficulty, images, seen))
  return rows


def records(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
  """Yields where each row of a file is, for messages, and its columns.

  Raises:
    ImportError: for a parquet file without pyarrow.
    OSError: if the file cannot be read.
    ValueError: for a file without rows, in another format, or with lines that
      are not of its format.
  """
  file = expand(path)
  if file.suffix not in _READERS:
    raise ValueError(
      f'{file} ends in {file.suffix!r}, and files of questions end in '
      f'{suggestions.join_names(_READERS)}: convert it, or rename it.'
    )
  is_empty = True
  for where, row in _READERS[file.suffix](file):
    is_empty = False
    yield where, row
  if is_empty:
    raise ValueError(f'{file} has no rows: give a file with questions.')


def expand(path: str) -> pathlib.Path:
  """The path with `~` and environment variables expanded.

  Raises:
    FileNotFoundError: if there is no such file.
    ValueError: if it is a folder, or an environment variable is not set.
  """
  # An unset variable would become part of a name that looks complete.
  expanded = os.path.expanduser(os.path.expandvars(path))
  if '$' in expanded:
    raise ValueError(
      f'{path} names an environment variable that is not set: set it to the '
      'folder, or write the folder out.'
    )
  file = pathlib.Path(expanded)
  if file.is_dir():
    found = sorted(x.name for x in file.iterdir() if x.suffix in _READERS)
    raise ValueError(
      f'{file} is a folder: name one of its files'
      + (f', such as {suggestions.join_names(found[:3])}.' if found else '.')
    )
  if not file.is_file():
    raise FileNotFoundError(
      f'There is no file {file} (searched in {pathlib.Path.cwd()}): give the '
      'path of a file of questions.'
    )
  return file


def recognized(
  paths: Sequence[str], images: Sequence[Iterable[pictures.Image]]
) -> source_files.Files:
  """Files of questions, by whose digests a resumed run recognizes them.

  Args:
    paths: the files.
    images: of the questions of each. Those in files of their own are read.
  """
  named = [[x for x in own if isinstance(x, pathlib.Path)] for own in images]
  pairs = [*zip(paths, named, strict=True)]
  return source_files.Files(
    paths,
    np.array([source_files.digest(expand(path), own) for path, own in pairs]),
    frozenset(path for path, own in pairs if own),
  )


def _find_columns(row, prompt_column, answer_column: str, where: str) -> str:
  """The column of questions, if the file has it and that of answers."""
  existing = f'columns are {suggestions.join_names(row)}'
  if prompt_column is None:
    prompt_column = next((c for c in PROMPT_COLUMNS if c in row), None)
  elif prompt_column not in row:
    raise ValueError(
      f'{where} has no column {prompt_column!r}; its {existing}: bind '
      'prompt_column (QUESTION in gin) to one of them.'
    )
  if prompt_column is None:
    names = suggestions.join_names(PROMPT_COLUMNS)
    raise ValueError(
      f'{where} has none of the columns {names}; its {existing}: bind '
      'prompt_column (QUESTION in gin) to the one with the questions.'
    )
  # A first row that lacks its answer is a row without one, not a wrong name.
  if answer_column not in row and len(row) > 1:
    raise ValueError(
      f'{where} has no column {answer_column!r}; its {existing}: bind '
      'answer_column (ANSWER in gin) to the one with the answers.'
    )
  return prompt_column


def checked_prompt(value: Any, column: str, where: str):
  """A question as text, or as messages.

  Raises:
    ValueError: for anything else, or messages that do not end with the user's.
  """
  if isinstance(value, list) and value:
    check_messages(value, column, where)
    if value[-1]['role'] != 'user':
      raise ValueError(
        f'{where} ends with a message of the {value[-1]["role"]}, which leaves '
        'nothing to answer: end it with one of the user.'
      )
    return tuple(value)
  if not isinstance(value, str) or not value.strip():
    raise ValueError(
      f'{where} has no question in {column!r}: give it a text or a list of '
      'messages, or leave the row out.'
    )
  return checked_text(value, where)


def check_messages(messages: list[Any], column: str, where: str):
  """Raises ValueError unless all of a list are messages."""
  for message in messages:
    _check_message(message, column, where)


def _check_message(message: Any, column: str, where: str):
  is_message = (
    isinstance(message, dict)
    and message.get('role') in ROLES
    and pictures.is_content(message.get('content'))
  )
  if not is_message:
    raise ValueError(
      f'{where} has {str(message)[:80]!r} in {column!r}: a message is '
      '{"role": ..., "content": ...} with a role of '
      f'{suggestions.join_names(ROLES)}, and its content a text or a list of '
      'parts, {"type": "text", "text": ...} and {"type": "image"}.'
    )
  checked_text(pictures.text_of(message['content']), where)


def _answer(value: Any, column: str, where: str) -> str:
  """An answer as text."""
  is_nan = isinstance(value, float) and math.isnan(value)  # A null of pandas.
  if value is None or is_nan or value in ('', [], {}):
    raise ValueError(
      f'{where} has no answer in {column!r}: give it one, or leave the row out.'
    )
  text = value if isinstance(value, str) else _json(value, column, where)
  return checked_text(text, where)


def _json(value: Any, column: str, where: str) -> str:
  """A value as JSON."""
  try:
    return json.dumps(value)
  except (TypeError, ValueError, RecursionError) as error:
    raise ValueError(
      f'{where} has a {type(value).__name__} in {column!r}, which JSON cannot '
      f'hold ({error}): write it as text.'
    ) from error


def _names(columns: str | Sequence[str]) -> list[str]:
  """The names of columns, each once."""
  names = [columns] if isinstance(columns, str) else list(columns)
  if len({*names}) < len(names):
    raise ValueError(
      f'columns = {names} (COLUMNS in gin) has a name twice: name each column '
      'once.'
    )
  return names


def _seen(row, columns: Sequence[str], where: str) -> str:
  """JSON of the columns of a row that rewards see, by name; '' for none."""
  missing = [name for name in columns if name not in row]
  if missing:
    raise ValueError(
      f'{where} has no column {missing[0]!r}; its columns are '
      f'{suggestions.join_names(row)}: bind columns (COLUMNS in gin) to some '
      'that every row has, with null where there is no value.'
    )
  pairs = [
    f'{json.dumps(name)}: {_json(row[name], name, where)}' for name in columns
  ]
  return f'{{{", ".join(pairs)}}}' if pairs else ''


def _difficulty(row, column: str | None, where: str) -> float | None:
  """The difficulty of a question, as a number."""
  if column is None:
    return None
  try:
    difficulty = float(row[column])
  except (KeyError, TypeError, ValueError):
    difficulty = math.nan
  if not math.isfinite(difficulty):
    raise ValueError(
      f'{where} has {row.get(column)!r} as its difficulty in {column!r}: give '
      'every row a number, higher for harder questions, or bind no '
      'difficulty_column.'
    )
  return difficulty


def checked_text(text: str, where: str) -> str:
  """The text, if it can be written in UTF-8: JSON can hold half a character."""
  try:
    text.encode()
  except UnicodeEncodeError as error:
    raise ValueError(
      f'{where} has half of a character ({error.object[error.start]!r}), which '
      'no tokenizer can read: remove it.'
    ) from error
  return text


def _csv_rows(file: pathlib.Path) -> Iterator[tuple[str, dict[str, Any]]]:
  """The rows of a CSV file, whose first line names the columns."""
  with json_lines.text_of(file, newline='') as lines:
    reader = csv.DictReader(lines)
    for row in _csv_records(reader, file):
      where = f'{file} line {reader.line_num}'
      if None in row:
        raise ValueError(
          f'{where} has more fields than the first line names columns: put '
          'quotes around a field with a comma in it.'
        )
      yield where, row


def _csv_records(reader: csv.DictReader, file: pathlib.Path):
  """Yields what a reader does; its errors name the file and the line."""
  try:
    names = reader.fieldnames or ()
    # Nameless columns are the commas at the ends of a spreadsheet's lines.
    twice = sorted({name for name in names if name and names.count(name) > 1})
    if twice:
      raise ValueError(
        f'{file} line 1 names the columns {suggestions.join_names(twice)} '
        'more than once: rename or remove the others.'
      )
    yield from reader
  except csv.Error as error:
    raise ValueError(
      f'{file} line {reader.line_num + 1} cannot be read as CSV ({error}): '
      'mend it, or convert the file to .jsonl.'
    ) from error


def _parquet_rows(file: pathlib.Path) -> Iterator[tuple[str, dict[str, Any]]]:
  """The rows of a parquet file."""
  try:
    import pyarrow
    from pyarrow import parquet
  except ImportError as error:
    raise ImportError(
      f'{file} needs pyarrow, which is not installed: pip install '
      '"rlinf-jax[parquet]", or convert the file to .jsonl.'
    ) from error
  i = 0
  try:
    for batch in parquet.ParquetFile(file).iter_batches():
      for row in batch.to_pylist():
        i += 1
        yield f'{file} row {i}', row
  # Some broken pages are an `OSError`, and some dates a `ValueError`.
  except (pyarrow.ArrowException, OSError, ValueError) as error:
    raise ValueError(
      f'{file} cannot be read as parquet after {i} rows ({error}): write it '
      'again, or convert it to .jsonl.'
    ) from error


_READERS = {
  '.jsonl': functools.partial(
    json_lines.rows, example='{"prompt": ..., "answer": ...}'
  ),
  '.csv': _csv_rows,
  '.parquet': _parquet_rows,
}
