"""Finding gin files: in the current folder, then beside the package."""

import pathlib

from rlinf_jax import config_errors


def find(name: str) -> str:
  """The path of a gin file.

  Raises:
    FileNotFoundError: if there is none.
  """
  for folder in (pathlib.Path(), config_errors.ROOT):
    if (folder / name).is_file():
      return str(folder / name)
  raise FileNotFoundError(config_errors.no_file(name))


def read(name: str) -> str:
  """The text of a gin file; raises as `find`."""
  return pathlib.Path(find(name)).read_text()
