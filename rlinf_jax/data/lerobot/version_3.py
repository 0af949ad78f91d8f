"""Lists of a LeRobot folder of version 3, whose files have several episodes.

meta/episodes tells which files each episode is in, and when it begins in its
videos; meta/tasks.parquet has the instructions.
"""

from collections.abc import Mapping, Sequence
import math
import pathlib
from typing import Any

from rlinf_jax.data.lerobot import extra, places

EPISODES, TASKS = 'meta/episodes', 'meta/tasks.parquet'
FILE = ('chunk_index', 'file_index')


def episodes(
  root: pathlib.Path, info: Mapping[str, Any], videos: Sequence[str]
) -> tuple[places.Episode, ...]:
  """The files of all episodes.

  Args:
    root: the folder.
    info: the content of meta/info.json.
    videos: the cameras that have videos.

  Raises:
    FileNotFoundError: without a list of episodes.
    ImportError: without pyarrow.
    ValueError: for entries that lack something.
  """
  columns = ['episode_index', 'length', *(f'data/{x}' for x in FILE)]
  for name in videos:
    columns += [f'videos/{name}/{x}' for x in (*FILE, 'from_timestamp')]
  paths = sorted((root / EPISODES).glob('*/*.parquet'))
  if not paths:
    raise FileNotFoundError(
      f'There are no episodes in {root / EPISODES}: finish the recording with '
      "LeRobot's finalize()."
    )

  def place(row):
    at = lambda part: {x: row[f'{part}/{x}'] for x in FILE}
    shown = {
      name: (
        places.path(
          root,
          info.get('video_path'),
          video_key=name,
          **at(f'videos/{name}'),
        ),
        _second(root, row, f'videos/{name}/from_timestamp'),
      )
      for name in videos
    }
    return places.path(root, info['data_path'], **at('data')), shown

  return places.episodes(
    (
      (f'Row {i} of {path}', row)
      for path in paths
      for i, row in enumerate(extra.read_table(path, columns).to_pylist())
    ),
    place,
  )


def _second(root: pathlib.Path, row: Mapping[str, Any], name: str) -> float:
  """The second at which an episode begins in a video."""
  found = row[name]
  if not (isinstance(found, int | float) and 0 <= found < math.inf):
    raise ValueError(
      f'Episode {row["episode_index"]} of {root} has the {name} {found!r}: '
      'write it anew with LeRobot.'
    )
  return float(found)


def tasks(root: pathlib.Path) -> dict[int, str]:
  """Instructions by number; their column is the index of a pandas table.

  Raises:
    FileNotFoundError: without a list of them.
    ImportError: without pyarrow.
    ValueError: for entries that lack something.
  """
  path = root / TASKS
  if not path.is_file():
    raise FileNotFoundError(f'There is no {path}, which has the instructions.')
  found = []
  for i, row in enumerate(extra.read_table(path).to_pylist()):
    texts = [x for x in row.values() if isinstance(x, str)]
    text = texts[0] if len(texts) == 1 else texts
    found.append((f'Row {i} of {path}', row.get('task_index'), text))
  return places.tasks(found)
