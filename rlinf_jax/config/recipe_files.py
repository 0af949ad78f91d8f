"""Finding gin files: in the current folder, then beside the package."""

from collections.abc import Sequence
import contextlib
import pathlib
import re

from rlinf_jax.config import config_errors

INCLUDE = re.compile(r'include\s+[\'"](.+?)[\'"]')


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
  """The text of a gin file.

  Raises:
    FileNotFoundError: if there is none.
    ValueError: if it is not a text.
  """
  try:
    return pathlib.Path(find(name)).read_text(encoding='utf-8')
  except UnicodeDecodeError as error:
    raise ValueError(
      f'{name} is not a gin file: it is not a text in UTF-8.'
    ) from error


def check(name: str, parents: Sequence[str] = ()) -> None:
  """Checks that a gin file and its includes are texts that can be read.

  Args:
    name: of the file.
    parents: the files that include it, the outermost first.

  Raises:
    FileNotFoundError: if there is no such file. Of an include, the parser says
      so with its line.
    ValueError: if one is not a text, or includes itself.
  """
  if name in parents:
    way = ' → '.join([*parents[parents.index(name) :], name])
    raise ValueError(
      f'{name} includes itself ({way}): leave out one of these includes.'
    )
  for line in read(name).splitlines():
    if include := INCLUDE.match(line):
      with contextlib.suppress(FileNotFoundError):
        check(include[1], [*parents, name])
