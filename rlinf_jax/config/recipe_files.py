"""Finding gin files: in the current folder, then beside the package."""

from collections.abc import Sequence
import contextlib
import pathlib
import re

from rlinf_jax.config import suggestions

# The folder of `gin_configs`, in a checkout and in an installed wheel.
ROOT = pathlib.Path(__file__).resolve().parents[2]
INCLUDE = re.compile(r'include\s+[\'"](.+?)[\'"]')


def find(name: str) -> str:
  """The path of a gin file.

  Raises:
    FileNotFoundError: if there is none.
  """
  for folder in (pathlib.Path(), ROOT):
    if (folder / name).is_file():
      return str(folder / name)
  raise FileNotFoundError(no_file(name))


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


def with_includes(name: str, parents: Sequence[str] = ()) -> str:
  """The text of a gin file after those that it includes.

  An include that does not exist is left out, as the parser says so with its
  line, and one of a file that includes this one.

  Args:
    name: of the file.
    parents: the files that include it.

  Raises:
    FileNotFoundError: if there is no such file itself.
    ValueError: if one is not a text.
  """
  text, texts = read(name), []
  for line in text.splitlines():
    include = INCLUDE.match(line)
    if include and include[1] not in (name, *parents):
      with contextlib.suppress(FileNotFoundError):
        texts.append(with_includes(include[1], (name, *parents)))
  return '\n'.join([*texts, text])


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


def no_file(name: str) -> str:
  """The message for a gin file that does not exist."""
  folder = pathlib.Path(name).parent
  existing = {
    str(folder / path.name)
    for root in (pathlib.Path(), ROOT)
    for path in (root / folder).glob('*.gin')
  }
  existing |= {
    str(x.relative_to(ROOT)) for x in ROOT.glob('gin_configs/**/*.gin')
  }
  if folder.is_absolute():
    where = folder
  else:
    where = ' and '.join(dict.fromkeys([str(pathlib.Path.cwd()), str(ROOT)]))
  return (
    f'There is no gin file {name} (searched in {where})'
    f'{suggestions.suggest(name, sorted(existing))}'
  )
