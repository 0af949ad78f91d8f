"""Records of TFRecord files, each an episode, checked by their checksums.

A record is its length (8 bytes, the least significant first), a checksum of
that, its content, and a checksum of the content.
"""

from collections.abc import Iterator
import pathlib
import struct
from typing import Any, NamedTuple

from rlinf_jax.data.rlds import extra

HEADER = struct.Struct('<QI')
FOOTER = struct.Struct('<I')


class Record(NamedTuple):
  """The place of a record in its file.

  Attributes:
    path: its file.
    start: the first byte of its content.
    size: bytes of its content.
  """

  path: pathlib.Path
  start: int
  size: int


def find(path: pathlib.Path) -> Iterator[Record]:
  """Yields the records of a file, whose contents are not read.

  Raises:
    FileNotFoundError: if there is no such file.
    ValueError: if it is no TFRecord file, or ends within a record.
  """
  if not path.is_file():
    raise FileNotFoundError(f'There is no {path}: copy the data set again.')
  end = path.stat().st_size
  with path.open('rb') as file:
    at = 0
    while at < end:
      file.seek(at)
      header = file.read(HEADER.size)
      whole = len(header) == HEADER.size
      size, check = HEADER.unpack(header) if whole else (0, 0)
      if whole and check != extra.checksum(header[:8]):
        raise ValueError(
          f'{path} is no TFRecord file, or damaged: the checksum at byte '
          f'{at + 8} is wrong. Copy the data set again.'
        )
      start = at + HEADER.size
      at = start + size + FOOTER.size
      if not whole or at > end:
        raise ValueError(
          f'{path} ends within a record, after {end} bytes: copy the data set '
          'again.'
        )
      yield Record(path, start, size)


def values(record: Record) -> dict[str, Any]:
  """The lists of values of a record, by the name of their feature.

  Raises:
    ValueError: if the content is damaged, or is no `tf.train.Example`.
  """
  with record.path.open('rb') as file:
    file.seek(record.start)
    content = file.read(record.size)
    footer = file.read(FOOTER.size)
  where = f'The record at byte {record.start} of {record.path}'
  if footer != FOOTER.pack(extra.checksum(content)):
    raise ValueError(
      f'{where} is damaged: its checksum is wrong. Copy the data set again.'
    )
  try:
    parsed = extra.example(content)
  except ValueError as error:
    raise ValueError(
      f'{where} is no tf.train.Example: it was not written by '
      'tensorflow_datasets.'
    ) from error
  found = {}
  for entry in parsed.features.feature:
    lists = [x for _, x in entry.value.ListFields()]
    found[entry.key] = lists[0].value if lists else ()
  return found
