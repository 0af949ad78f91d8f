"""pyarrow and PyAV, which come with the extra 'lerobot'."""

import contextlib
import pathlib
from typing import Any

import numpy as np


def _missing(name: str) -> ImportError:
  return ImportError(
    f'LeRobot folders need {name}, which is not installed: pip install '
    '"rlinf-jax[lerobot]".'
  )


def parquet() -> tuple[Any, Any]:
  """The modules pyarrow and pyarrow.parquet.

  Raises:
    ImportError: without pyarrow.
  """
  try:
    import pyarrow
    from pyarrow import parquet as module
  except ImportError as error:
    raise _missing('pyarrow') from error
  return pyarrow, module


def av() -> Any:
  """The module of PyAV.

  Raises:
    ImportError: without it.
  """
  try:
    import av as module
  except ImportError as error:
    raise _missing('PyAV (av)') from error
  return module


def read_table(path: pathlib.Path, columns=None, filters=None) -> Any:
  """A parquet file as a table of pyarrow.

  Raises:
    FileNotFoundError: if there is no such file.
    ImportError: without pyarrow.
    ValueError: if it cannot be read, or lacks a column.
  """
  pyarrow, module = parquet()
  if not path.is_file():
    raise FileNotFoundError(f'There is no {path}: copy the folder again.')
  try:
    known = module.read_schema(path).names
    absent = [x for x in columns or () if x not in known]
    if absent:
      raise ValueError(
        f'{path} has the columns {", ".join(known)}, and lacks '
        f'{", ".join(absent)}: name those that it has.'
      )
    return module.read_table(path, columns=columns, filters=filters)
  except pyarrow.ArrowException as error:
    raise ValueError(
      f'{path} is not a parquet file that can be read ({error}).'
    ) from error


def array(column, where: str) -> np.ndarray:
  """A column of numbers [T], or of lists of n numbers [T, n].

  Args:
    column: of a table of pyarrow.
    where: its name and file, for errors.

  Raises:
    ValueError: for empty fields, lists of lists, or lists of different lengths.
  """
  if column.null_count:
    raise ValueError(f'{where} has empty fields: fill them.')
  rows = column.combine_chunks()
  if not _has_lists(rows):
    return rows.to_numpy(zero_copy_only=False)
  values = rows.flatten()
  if _has_lists(values):
    raise ValueError(f'{where} has lists of lists, expected lists of numbers.')
  lengths = np.unique(rows.value_lengths().to_numpy(zero_copy_only=False))
  if len(lengths) > 1:
    raise ValueError(
      f'{where} has lists of different lengths, {lengths[0]} to {lengths[-1]}: '
      'give each step as many numbers.'
    )
  # Without rows, there is no list to tell how many numbers one has.
  width = lengths[0] if len(lengths) else 0
  return values.to_numpy(zero_copy_only=False).reshape(len(rows), width)


def _has_lists(x) -> bool:
  return hasattr(x, 'flatten') and hasattr(x.type, 'value_type')


def decoded(path: pathlib.Path, start: float):
  """Yields the second and the picture of each frame, from `start` seconds on.

  Decoding starts at the key frame before, whose frames are yielded, too.

  Raises:
    FileNotFoundError: if there is no such file.
    ImportError: without PyAV.
    ValueError: if it is no video that can be decoded.
  """
  module = av()
  if not path.is_file():
    raise FileNotFoundError(f'There is no {path}: copy the folder again.')
  with contextlib.ExitStack() as stack:
    try:
      container = stack.enter_context(module.open(str(path)))
      stream = container.streams.video[0]
      stream.thread_type = 'AUTO'
      container.seek(int(start / stream.time_base), stream=stream)
      for frame in container.decode(stream):
        yield float(frame.pts * stream.time_base), frame
    except (module.FFmpegError, IndexError) as error:
      raise ValueError(
        f'{path} is no video that can be decoded ({error}): encode it again, '
        'as AV1 or H.264.'
      ) from error
