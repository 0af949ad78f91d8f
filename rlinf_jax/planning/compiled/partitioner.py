"""Warnings of XLA's partitioner, which it writes to the standard error."""

from collections.abc import Iterator
import contextlib
import os
import re
import subprocess
import sys
import tempfile

REMATERIALIZED = 'Involuntary full rematerialization'
# Shows a file if standard input ends before a line has come.
SHOW_UNLESS_TOLD = 'read -r _ || { cat "$1" >&2; rm -f "$1"; }'


@contextlib.contextmanager
def captured_warnings() -> Iterator[list[str]]:
  """Collects the arrays that XLA had to replicate to change their layout.

  XLA writes such a warning to the file descriptor of the standard error, so
  that is redirected for the whole process. All other lines are passed on at the
  end, also where a failed check of XLA aborts the process.

  Yields:
    A list that is filled at the end, with the operations that XLA names.
  """
  found = []
  sys.stderr.flush()
  kept = os.dup(2)
  with tempfile.NamedTemporaryFile() as file:
    watcher = subprocess.Popen(
      ['sh', '-c', SHOW_UNLESS_TOLD, 'sh', file.name],
      stdin=subprocess.PIPE,
      stderr=kept,
    )
    os.dup2(file.fileno(), 2)
    try:
      yield found
    finally:
      sys.stderr.flush()
      os.dup2(kept, 2)
      os.close(kept)
      watcher.communicate(b'\n')
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
