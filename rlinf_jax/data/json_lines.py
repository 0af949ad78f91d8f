"""Files with a JSON object on each line."""

from collections.abc import Iterator
import json
import pathlib
from typing import Any


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
  with path.open(encoding='utf-8-sig') as lines:
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
