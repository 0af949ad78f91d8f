"""Files with a JSON object on each line."""

from collections.abc import Iterator
import contextlib
import json
import pathlib
from typing import Any, TextIO


def rows(
  path: pathlib.Path, example: str
) -> Iterator[tuple[str, dict[str, Any]]]:
  """Yields where each object is, for messages, and the object.

  Args:
    path: the file; empty lines in it are skipped.
    example: an object as it should be, for errors.

  Raises:
    OSError: if the file cannot be read.
    ValueError: for a line that is no JSON object, or no text in UTF-8.
  """
  with text_of(path) as lines:
    for i, line in enumerate(lines, 1):
      if not line.strip():
        continue
      where = f'{path} line {i}'
      try:
        row = json.loads(line)
      except (ValueError, RecursionError) as error:
        raise ValueError(f'{where} is not JSON ({error}): mend it.') from error
      if not isinstance(row, dict):
        raise ValueError(
          f'{where} is not a JSON object: write rows as {example}.'
        )
      yield where, row


@contextlib.contextmanager
def text_of(path: pathlib.Path, newline: str | None = None) -> Iterator[TextIO]:
  """A file of text in UTF-8, also with a mark of its order of bytes.

  Args:
    path: the file.
    newline: as for `open`.

  Raises:
    OSError: if the file cannot be read.
    ValueError: while it is read, for bytes that are not UTF-8.
  """
  try:
    with path.open(encoding='utf-8-sig', newline=newline) as text:
      yield text
  except UnicodeDecodeError as error:
    raise ValueError(
      f'{path} is not text in UTF-8 ({error.reason} at byte {error.start}): '
      'convert it.'
    ) from error
