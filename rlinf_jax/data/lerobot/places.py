"""Files in which the steps and pictures of episodes are stored."""

from collections.abc import Callable, Iterable, Mapping
import pathlib
import re
from typing import Any, NamedTuple

INFO = 'meta/info.json'
# A name, and at most how many digits a number has: a width of a billion in a
# folder from strangers would fill the memory.
FIELD = re.compile(r'{\w+(:0?\d{1,2}d)?}')


class Episode(NamedTuple):
  """The files of an episode.

  Attributes:
    index: its number.
    length: its steps.
    numbers: the parquet file of its numbers, and of its pictures that are in
      columns.
    videos: by camera, the video and the second at which the episode begins.
  """

  index: int
  length: int
  numbers: pathlib.Path
  videos: dict[str, tuple[pathlib.Path, float]]


def episodes(
  rows: Iterable[tuple[str, Mapping[str, Any]]],
  place: Callable[[Mapping[str, Any]], tuple[pathlib.Path, dict]],
) -> tuple[Episode, ...]:
  """Episodes in the order of their numbers.

  Args:
    rows: where each episode is listed, for messages, and its 'episode_index'
      and 'length'.
    place: `row -> numbers, videos`, as `Episode` has them.

  Raises:
    ValueError: for a number that is none or occurs twice, or no steps.
  """
  found = {}
  for where, row in rows:
    index, length = row.get('episode_index'), row.get('length')
    if not (_is_count(index) and _is_count(length)):
      raise ValueError(
        f'{where} has the episode_index {index!r:.40} and the length '
        f'{length!r:.40}: give integers of at least 0.'
      )
    if index in found:
      raise ValueError(
        f'{where} lists episode {index}, as an entry before it does: leave one '
        'of them out.'
      )
    if not length:
      raise ValueError(
        f'{where} says that episode {index} has 0 steps: leave it out.'
      )
    found[index] = Episode(index, length, *place(row))
  return tuple(found[index] for index in sorted(found))


def tasks(rows: Iterable[tuple[str, Any, Any]]) -> dict[int, str]:
  """Instructions by number.

  Args:
    rows: where each is listed, for messages, its number and its text.

  Raises:
    ValueError: for another number or text, or two texts of one number.
  """
  found = {}
  for where, index, text in rows:
    if not (_is_count(index) and isinstance(text, str)):
      raise ValueError(
        f'{where} has the task {text!r:.40} of the task_index {index!r:.40}: '
        'expected a text and an integer of at least 0.'
      )
    if found.setdefault(index, text) != text:
      raise ValueError(
        f'{where} has the task {text!r:.40} of the task_index {index}, which '
        f'is that of {found[index]!r:.40}, too: give each a number of its own.'
      )
  return found


def _is_count(x: Any) -> bool:
  return isinstance(x, int) and not isinstance(x, bool) and x >= 0


def path(root: pathlib.Path, template: Any, **names) -> pathlib.Path:
  """A path of meta/info.json, which may not leave the folder.

  Args:
    root: the folder.
    template: such as 'data/chunk-{chunk_index:03d}/file-{file_index:03d}'.
    **names: what may be between braces.

  Raises:
    ValueError: if it has no meaning, or leaves the folder.
  """
  try:
    if not isinstance(template, str) or {'{', '}'} & {*FIELD.sub('', template)}:
      raise ValueError
    found = (root / template.format(**names)).resolve()
  except (KeyError, TypeError, ValueError) as error:
    raise ValueError(
      f'{root / INFO} has the path {template!r:.100}, which has no meaning '
      f'here: give one in which {", ".join(names)} are between braces.'
    ) from error
  if not found.is_relative_to(root.resolve()):
    raise ValueError(f'{root / INFO} names {found}, outside of the folder.')
  return root / template.format(**names)
