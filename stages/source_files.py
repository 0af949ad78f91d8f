"""Recognizes the files of a source, which a resumed run must find unchanged.

The order of rows is a function of the files and a seed, and a checkpoint has a
position in it. In other files, that position would be among other rows, and
scores of other held-out rows could not be compared with those before.
"""

from collections.abc import Callable, Sequence
import hashlib
import os
from typing import Any, NamedTuple

import numpy as np

TRAIN, HELD_OUT = 'digest', 'held_out_digest'  # Entries of a source's state.
ENDS = 2**16  # Bytes that are read at both ends of a large file.


class Files(NamedTuple):
  """Files of rows, in their order.

  Attributes:
    paths: the files.
    digests: of each.
    pictured: those whose digests cover pictures in other files.
  """

  paths: Sequence[str | os.PathLike]
  digests: np.ndarray
  pictured: frozenset[str | os.PathLike] = frozenset()


def digest(
  path: str | os.PathLike, pictures: Sequence[str | os.PathLike] = ()
) -> np.int64:
  """A digest of a file's content, and of that of the pictures that it names.

  Where the pictures are does not count.

  Raises:
    OSError: if one cannot be read.
  """
  with open(path, 'rb') as file:
    found = hashlib.file_digest(file, 'sha256')
  for picture in dict.fromkeys(pictures):
    with open(picture, 'rb') as file:
      found.update(hashlib.file_digest(file, 'sha256').digest())
  return _number(found)


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


def entries(train: Files, held_out: Files | None = None) -> dict[str, Any]:
  """The entries of a source's state by which its files are recognized."""
  found = {TRAIN: train.digests}
  return found | ({HELD_OUT: held_out.digests} if held_out else {})


def checker(
  train: Files, held_out: Files | None = None
) -> Callable[[Any], None]:
  """Returns `Source.check`: refuses a state of other files than these.

  Args:
    train: files to train on.
    held_out: files to evaluate on, if these are other files.
  """

  def check(state):
    _check(state[TRAIN], train, 'train on', 'go on with other rows than follow')
    if held_out:
      loss = 'be evaluated on other rows than before'
      _check(state[HELD_OUT], held_out, 'evaluate on', loss)

  return check


def _check(found: np.ndarray, now: Files, purpose: str, loss: str):
  """Compares the files of a source with those that its run was begun with.

  Args:
    found: digests of the files then.
    now: the files.
    purpose: what they are for.
    loss: what a run with other files would do.

  Raises:
    ValueError: names those that differ.
  """
  if np.array_equal(found, now.digests):
    return
  if len(found) != len(now.digests):
    raise ValueError(
      f'The run was begun with {len(found)} files to {purpose}, and '
      f'{len(now.digests)} are given now: give the same ones, as in its '
      'config.gin, or choose another --workdir.'
    )
  if sorted(found) == sorted(now.digests):
    raise ValueError(
      f'The run was begun with its files to {purpose} in another order, and '
      f'their order is {", ".join(map(str, now.paths))} now: give them in the '
      'order of its config.gin, or choose another --workdir.'
    )
  changed = [
    f'{path} or a picture that it names' if path in now.pictured else str(path)
    for path, before, after in zip(now.paths, found, now.digests, strict=True)
    if before != after
  ]
  raise ValueError(
    f'{" and ".join(changed)} changed since the run was begun, so it would '
    f'{loss}: restore what was there, or choose another --workdir.'
  )


def _number(found) -> np.int64:
  return np.frombuffer(found.digest()[:8], np.int64)[0]
