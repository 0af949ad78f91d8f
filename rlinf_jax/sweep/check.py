"""Checks the bindings of a grid before any of its points runs.

python -m rlinf_jax.sweep.check < JSON    # as `check` starts it
"""

from collections.abc import Iterator, Sequence
import contextlib
import json
import subprocess
import sys

from rlinf_jax import command_line, startup
from rlinf_jax.config import config, config_errors
from rlinf_jax.sweep import grid


def check(
  gin_files: Sequence[str],
  gin_bindings: Sequence[str],
  points: Sequence[grid.Point],
):
  """Reads the recipe with each value of the grid, as a run would.

  A process of its own does it, as reading a recipe imports what it names. Each
  value is tried once, beside the first values of the other parameters.

  Args:
    gin_files: of the recipe.
    gin_bindings: likewise.
    points: of the grid.

  Raises:
    ValueError: for a recipe or a value that a run would refuse as it is read.
  """
  tried = [[*gin_bindings, *grid.bindings(point)] for point in _tried(points)]
  done = subprocess.run(
    [sys.executable, '-m', 'rlinf_jax.sweep.check'],
    input=json.dumps([list(gin_files), tried]),
    capture_output=True,
    text=True,
  )
  if done.returncode:
    raise ValueError((done.stdout or done.stderr).strip())


def _tried(points: Sequence[grid.Point]) -> Iterator[grid.Point]:
  """Yields the first point, and each that differs from it in one value."""
  first = points[0].values
  for point in points:
    if sum(point.values[name] != first[name] for name in first) <= 1:
      yield point


def main():
  """Exits with the first error that a run would print."""
  # Imported here: a sweep, which imports this module, needs none of it.
  from rlinf_jax import train

  gin_files, tried = json.load(sys.stdin)
  for bindings in tried:
    try:
      # Modules may print as they are imported: that is not the error.
      with contextlib.redirect_stdout(sys.stderr):
        config.parse(gin_files, bindings, '')
        config.refuse_unused(train.train)
    except command_line.USER_ERRORS as error:
      print(config_errors.text(error))
      sys.exit(1)


if __name__ == '__main__':
  with startup.ended():
    main()
