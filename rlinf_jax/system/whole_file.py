"""Files that are replaced as a whole, also where writing is interrupted."""

from collections.abc import Iterator
import contextlib
import os
import pathlib


@contextlib.contextmanager
def replaced(path: str | os.PathLike) -> Iterator[pathlib.Path]:
  """Yields a path to write to; its file then takes the place of `path`.

  After an error, such as that of a full disk, the earlier file is still there.
  """
  path = pathlib.Path(path)
  part = path.with_name(f'part_{path.name}')  # Libraries read its suffix.
  try:
    yield part
    part.replace(path)
  except BaseException:
    with contextlib.suppress(OSError):
      part.unlink()
    raise


def write_text(path: str | os.PathLike, text: str):
  """Writes a text file in UTF-8, as a whole."""
  with replaced(path) as part:
    part.write_text(text, encoding='utf-8')
