"""Recognizes the files of a source, which a resumed run must find unchanged.

The order of rows is a function of the files and a seed, and a checkpoint has a
position in it. In other files, that position would be among other rows.
"""

from collections.abc import Callable, Sequence
import hashlib
import os
from typing import Any

import numpy as np

Next = Callable[[Any, dict[str, float]], tuple[Any, Any]]
DIGEST = 'digest'  # The entry of a source's state.
ENDS = 2**16  # Bytes that are read at both ends of a large file.


def digest(path: str | os.PathLike) -> np.int64:
  """A digest of a file's content.

  Raises:
    OSError: if it cannot be read.
  """
  with open(path, 'rb') as file:
    return _number(hashlib.file_digest(file, 'sha256'))


def digest_of_many(
  paths: Sequence[str | os.PathLike], described: str
) -> np.int64:
  """A digest of large files, such as videos, of which parts are read.

  These are their sizes, and what they begin and end with.

  Args:
    paths: the files, in their order; where they are does not count.
    described: text that also must not change.

  Raises:
    OSError: if one cannot be read.
  """
  found = hashlib.sha256(described.encode())
  for path in paths:
    if not os.path.isfile(path):
      raise FileNotFoundError(f'There is no {path}: copy the folder again.')
    with open(path, 'rb') as file:
      size = file.seek(0, os.SEEK_END)
      found.update(size.to_bytes(8, 'little'))
      file.seek(0)
      found.update(file.read(ENDS))
      file.seek(max(0, size - ENDS))
      found.update(file.read(ENDS))
  return _number(found)


def checked(
  advance: Next, now: np.ndarray, paths: Sequence[str | os.PathLike]
) -> Next:
  """Returns `Source.next` that refuses a state of other files.

  Args:
    advance: `Source.next`, whose states have digests under `DIGEST`.
    now: digests of the files.
    paths: the files.
  """

  def next_batch(state, metrics):
    _check(state[DIGEST], now, paths)
    return advance(state, metrics)

  return next_batch


def _check(found: np.ndarray, now: np.ndarray, paths):
  """Compares the files of a source with those that its run was begun with.

  Raises:
    ValueError: names those that differ.
  """
  if np.array_equal(found, now):
    return
  if len(found) != len(now):
    raise ValueError(
      f'The run was begun with {len(found)} files to train on, and '
      f'{len(now)} are given now: give the same ones, as in its config.gin, or '
      'choose another --workdir.'
    )
  if sorted(found) == sorted(now):
    raise ValueError(
      'The run was begun with its files to train on in another order, and '
      f'their order is {", ".join(map(str, paths))} now: give them in the '
      'order of its config.gin, or choose another --workdir.'
    )
  changed = [
    str(path)
    for path, before, after in zip(paths, found, now, strict=True)
    if before != after
  ]
  raise ValueError(
    f'{" and ".join(changed)} changed since the run was begun, so it would go '
    'on with other rows than those that follow: restore what was there, or '
    'choose another --workdir.'
  )


def _number(found) -> np.int64:
  return np.frombuffer(found.digest()[:8], np.int64)[0]
