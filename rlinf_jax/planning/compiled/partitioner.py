"""Warnings of XLA's partitioner, which it writes to the standard error."""

from collections.abc import Iterator
import contextlib
import os
import re
import sys
import tempfile

REMATERIALIZED = 'Involuntary full rematerialization'


@contextlib.contextmanager
def captured_warnings() -> Iterator[list[str]]:
  """Collects the arrays that XLA had to replicate to change their layout.

  XLA writes such a warning to the file descriptor of the standard error, so
  that is redirected for the whole process. All other lines are passed on at the
  end.

  Yields:
    A list that is filled at the end, with the operations that XLA names.
  """
  found = []
  sys.stderr.flush()
  kept = os.dup(2)
  with tempfile.TemporaryFile() as file:
    os.dup2(file.fileno(), 2)
    try:
      yield found
    finally:
      sys.stderr.flush()
      os.dup2(kept, 2)
      os.close(kept)
      file.seek(0)
      text = file.read().decode(errors='replace')
      for line in text.splitlines(keepends=True):
        if REMATERIALIZED in line:
          found.append(_operation(line))
        else:
          sys.stderr.write(line)


def _operation(line: str) -> str:
  """Returns the operation, and the type, that a warning is about."""
  name = re.search(r'op_name="([^"]*)"', line)
  array = re.search(r'= (\w+\[[\d,]*\])', line)
  parts = [array[1] if array else '', name[1] if name else '']
  return ' '.join(filter(None, parts)) or line.strip()
