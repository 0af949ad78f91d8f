"""Lists of a LeRobot folder of version 2.0 or 2.1, whose files have an episode.

Each has a parquet file and a video of each camera, in folders of `chunks_size`
episodes. The lists are JSON lines.
"""

from collections.abc import Mapping, Sequence
import pathlib
from typing import Any

from rlinf_jax.data import json_lines
from rlinf_jax.data.lerobot import places

EPISODES, TASKS = 'meta/episodes.jsonl', 'meta/tasks.jsonl'
EXAMPLES = {
  EPISODES: '{"episode_index": 0, "length": 100}',
  TASKS: '{"task_index": 0, "task": "close the drawer"}',
}


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
    ValueError: for entries that lack something.
  """
  size = info.get('chunks_size')
  if not isinstance(size, int) or size < 1:
    raise ValueError(
      f'{root / places.INFO} has the chunks_size {size!r:.40}, expected how '
      'many episodes a folder has, such as 1000.'
    )

  def place(row):
    index = row['episode_index']
    at = {'episode_chunk': index // size, 'episode_index': index}
    shown = {
      name: (
        places.path(root, info.get('video_path'), video_key=name, **at),
        0.0,
      )
      for name in videos
    }
    return places.path(root, info['data_path'], **at), shown

  return places.episodes(_rows(root, EPISODES), place)


def tasks(root: pathlib.Path) -> dict[int, str]:
  """Instructions by number.

  Raises:
    FileNotFoundError: without a list of them.
    ValueError: for entries that lack something.
  """
  return places.tasks(
    (where, row.get('task_index'), row.get('task'))
    for where, row in _rows(root, TASKS)
  )


def _rows(root: pathlib.Path, name: str):
  """Yields the objects of a list, and where each is."""
  path = root / name
  if not path.is_file():
    raise FileNotFoundError(f'There is no {path}: copy the folder again.')
  yield from json_lines.rows(path, EXAMPLES[name])
