"""Tokens of the completions to plan for, as measured or at most."""

from collections.abc import Sequence
import json
import os
import pathlib

from planner.costs.decoding import decode
from planner.costs.work import StageWork


def read(file: str | os.PathLike) -> list[int]:
  """Reads the tokens of completions, a JSON list, from a file.

  Raises:
    ValueError: for a file with anything else, or with nothing.
  """
  try:
    lengths = json.loads(pathlib.Path(file).read_text())
  except (OSError, ValueError):
    lengths = None
  integers = isinstance(lengths, list) and all(type(n) is int for n in lengths)
  if not integers or not lengths or min(lengths) < 1:
    raise ValueError(
      f'{file} should hold the tokens of completions as a JSON list of whole '
      'numbers from 1 on, such as [212, 87, 1024].'
    )
  return lengths


def with_lengths(works, lengths: Sequence[int] | None):
  """Gives stages whose rows may end early their lengths.

  Args:
    works: of all stages, by name.
    lengths: tokens of completions; None where all have the maximum length.

  Returns:
    The work of all stages, and a sentence on what is assumed of the lengths.

  Raises:
    ValueError: for lengths that no stage has, or that do not determine when a
      stage ends.
  """
  open_ended = {
    name: decode.max_tokens(call)
    for name, call in works.items()
    if call and decode.max_tokens(call)
  }
  names = ', '.join(open_ended)
  if lengths is None:
    if not open_ended:
      return works, None
    return works, (
      f'Every row of {names} is assumed to have the maximum length, '
      f'{max(open_ended.values()):g} tokens; --lengths takes a file of the '
      'lengths to expect.'
    )
  if not open_ended:
    raise ValueError(
      'Lengths were given, and no stage has rows that end early.'
    )
  barriers = [name for name in open_ended if _is_barrier(works[name])]
  if barriers:
    raise ValueError(
      f'Lengths were given, and {barriers[0]} ends when enough rows have '
      'ended, which lengths do not determine: plan it without them.'
    )
  ending = {
    name: decode.with_lengths(works[name], lengths) for name in open_ended
  }
  return works | ending, (
    f'Rows of {names} have the {len(lengths):,} lengths that were given; the '
    f'longest is {max(lengths):,} tokens.'
  )


def _is_barrier(call: StageWork | decode.DecodeWork) -> bool:
  """Whether a call has the rows of the whole batch together."""
  if isinstance(call, decode.DecodeWork):
    return call.all_rows > 0
  return not call.rows
