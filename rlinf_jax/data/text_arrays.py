"""Texts as arrays of bytes, so that they travel with their rows."""

from collections.abc import Sequence
from typing import NamedTuple

from jaxtyping import Array, UInt8
import numpy as np


class Reference(NamedTuple):
  """The question and the answer of each row, for rewards: `Problem.answer`.

  Attributes:
    question: UTF-8 bytes of the question, padded with zeros.
    answer: UTF-8 bytes of the answer, likewise.
    columns: UTF-8 bytes of the JSON of further columns, likewise; None without
      any.
  """

  question: UInt8[Array, 'B n']
  answer: UInt8[Array, 'B m']
  columns: UInt8[Array, 'B k'] | None = None


def pack(texts: Sequence[str], width: int | None = None) -> np.ndarray:
  """UTF-8 bytes of texts, padded with zeros: uint8 [B, width].

  Args:
    texts: texts without zero bytes at their ends.
    width: bytes a row; those of the longest text by default, and at least 1.
  """
  rows = [text.encode() for text in texts]
  return _packed(rows, width or max(1, *map(len, rows), 1))


def _packed(rows: Sequence[bytes], width: int) -> np.ndarray:
  packed = np.zeros((len(rows), width), np.uint8)
  for i, row in enumerate(rows):
    packed[i, : len(row)] = np.frombuffer(row, np.uint8)
  return packed


class Texts:
  """Texts of a data set, of which batches take rows as `pack` has them.

  They are kept without padding, as one long text may stand among many short
  ones. Batches all have the width of the longest, so that steps are compiled
  once.
  """

  def __init__(self, texts: Sequence[str]):
    """Keeps texts without zero bytes at their ends."""
    self._rows = [text.encode() for text in texts]
    self._width = max(1, *map(len, self._rows), 1)

  def __getitem__(self, rows: Sequence[int]) -> np.ndarray:
    """UTF-8 bytes of some texts, padded with zeros: uint8 [B, width]."""
    return _packed([self._rows[i] for i in rows], self._width)


def unpack(packed: np.ndarray) -> list[str]:
  """The texts of rows of bytes."""
  return [
    row.tobytes().rstrip(b'\0').decode(errors='replace')
    for row in np.asarray(packed)
  ]
