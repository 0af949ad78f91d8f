"""Contents of a LeRobot folder: episodes, cameras, instructions and numbers.

Version 3 of the format keeps several episodes in each parquet file of numbers
and in each video. meta/info.json describes the features, meta/episodes tells
which files each episode is in, and meta/tasks.parquet has the instructions.
"""

from collections.abc import Mapping, Sequence
import pathlib
from typing import Any, NamedTuple

import numpy as np

from rlinf_jax.data.episode_files import base
from rlinf_jax.data.lerobot import extra
from stages.models.files import weights

INFO = 'meta/info.json'
EPISODES = 'meta/episodes'
TASKS = 'meta/tasks.parquet'
VERSION = 'v3.'
FILE = ('chunk_index', 'file_index')


class Episode(NamedTuple):
  """The files of an episode.

  Attributes:
    index: its number.
    length: its steps.
    numbers: the parquet file of its numbers.
    videos: by camera, the video and the second at which the episode begins.
  """

  index: int
  length: int
  numbers: pathlib.Path
  videos: dict[str, tuple[pathlib.Path, float]]


class Dataset(NamedTuple):
  """A folder, but for its pictures and numbers.

  Attributes:
    folder: the folder.
    fps: steps a second.
    features: by name.
    episodes: in the order of their numbers.
    tasks: instructions by their number.
  """

  folder: pathlib.Path
  fps: float
  features: dict[str, base.Feature]
  episodes: tuple[Episode, ...]
  tasks: dict[int, str]


def read(folder: str) -> Dataset:
  """The description of a folder; cameras without colors are left out.

  Raises:
    FileNotFoundError: if a file of the format is missing.
    ImportError: without pyarrow.
    ValueError: for another version, or files that are not of the format.
  """
  root = pathlib.Path(folder)
  info = _info(root)
  described = {name: _feature(name, x) for name, x in info['features'].items()}
  features = {name: x for name, x in described.items() if x is not None}
  return Dataset(
    root,
    float(info['fps']),
    features,
    _episodes(root, info, features),
    _tasks(root),
  )


def _info(root: pathlib.Path) -> Mapping[str, Any]:
  """The content of meta/info.json, which must have all that is read."""
  path = root / INFO
  if not path.is_file():
    raise FileNotFoundError(
      f'There is no {path}: give the folder of a LeRobot data set, in which '
      'meta, data and videos are, or that of an RLDS data set, in which '
      'features.json is.'
    )
  raw = weights.read_json(path)
  raw = raw if isinstance(raw, Mapping) else {}
  version = str(raw.get('codebase_version'))
  if not version.startswith(VERSION):
    raise ValueError(
      f'{root} is of version {version} of the LeRobot format, and v3.0 is read '
      'here: convert it with '
      'python -m lerobot.datasets.v30.convert_dataset_v21_to_v30.'
    )
  lacking = [
    name
    for name, kind in (
      ('fps', int | float),
      ('features', Mapping),
      ('data_path', str),
    )
    if not isinstance(raw.get(name), kind)
  ]
  if lacking or raw['fps'] <= 0:
    raise ValueError(
      f'{path} has no usable {", ".join(lacking) or "fps"}: write it anew with '
      'LeRobot.'
    )
  return raw


def _feature(name: str, raw: Any) -> base.Feature | None:
  """A feature, or None for pictures without three colors, such as of depth.

  Pictures may have their colors first or last.
  """
  try:
    dtype, shape = str(raw['dtype']), tuple(map(int, raw['shape']))
  except (KeyError, TypeError, ValueError) as error:
    raise ValueError(
      f'The feature {name!r} of {INFO} has no dtype and shape: write it anew '
      'with LeRobot.'
    ) from error
  if dtype in base.PICTURES:
    if len(shape) != 3 or 3 not in (shape[0], shape[-1]):
      return None
    if shape[-1] != 3:
      shape = (*shape[1:], shape[0])
  return base.Feature(dtype, shape)


def _episodes(root, info, features) -> tuple[Episode, ...]:
  """The files of all episodes, as meta/episodes names them."""
  videos = [name for name, x in features.items() if x.dtype == 'video']
  columns = ['episode_index', 'length', *(f'data/{x}' for x in FILE)]
  for name in videos:
    columns += [f'videos/{name}/{x}' for x in (*FILE, 'from_timestamp')]
  paths = sorted((root / EPISODES).glob('*/*.parquet'))
  if not paths:
    raise FileNotFoundError(
      f'There are no episodes in {root / EPISODES}: finish the recording with '
      "LeRobot's finalize()."
    )
  rows = []
  for path in paths:
    table = extra.read_table(path, columns)
    rows += table.to_pylist()
  found = []
  for row in sorted(rows, key=lambda row: row['episode_index']):
    if row['length'] < 1:
      raise ValueError(
        f'Episode {row["episode_index"]} of {root} has {row["length"]} steps '
        'by meta/episodes: leave it out.'
      )
    numbers = _path(
      root, info['data_path'], **{x: row[f'data/{x}'] for x in FILE}
    )
    shown = {
      name: (
        _path(
          root,
          info.get('video_path'),
          video_key=name,
          **{x: row[f'videos/{name}/{x}'] for x in FILE},
        ),
        float(row[f'videos/{name}/from_timestamp']),
      )
      for name in videos
    }
    found.append(Episode(row['episode_index'], row['length'], numbers, shown))
  return tuple(found)


def files(data: Dataset, cameras: Sequence[str]) -> list[pathlib.Path]:
  """The files of all episodes, with the videos of some cameras."""
  found = {}
  for episode in data.episodes:
    videos = [episode.videos[x][0] for x in cameras if x in episode.videos]
    found |= dict.fromkeys([episode.numbers, *videos])
  return [*found]


def _path(root: pathlib.Path, template: Any, **names) -> pathlib.Path:
  """A path of meta/info.json, which may not leave the folder."""
  try:
    path = root / str(template).format(**names)
  except (AttributeError, IndexError, KeyError, ValueError) as error:
    raise ValueError(
      f'{root / INFO} has the path {template!r}, which has no meaning here: '
      'write it anew with LeRobot.'
    ) from error
  if not path.resolve().is_relative_to(root.resolve()):
    raise ValueError(f'{root / INFO} names {path}, outside of the folder.')
  return path


def _tasks(root: pathlib.Path) -> dict[int, str]:
  """Instructions by number; their column is the index of a pandas table."""
  path = root / TASKS
  if not path.is_file():
    raise FileNotFoundError(f'There is no {path}, which has the instructions.')
  found = {}
  for row in extra.read_table(path).to_pylist():
    texts = [x for x in row.values() if isinstance(x, str)]
    if len(texts) != 1 or not isinstance(row.get('task_index'), int):
      raise ValueError(
        f'{path} has the row {row!r:.80}: expected a text and its task_index.'
      )
    found[row['task_index']] = texts[0]
  return found


def numbers(
  data: Dataset, episodes: Sequence[Episode], names: Sequence[str]
) -> list[dict[str, np.ndarray]]:
  """Columns of episodes, each [T, …] in the order of time.

  Args:
    data: the folder.
    episodes: which to read.
    names: the columns, besides frame_index.

  Raises:
    ValueError: for a missing column, an episode of another length, or numbers
      that are not finite.
  """
  by_file = {}
  for x in episodes:
    by_file.setdefault(x.numbers, []).append(x.index)
  found = {}
  for path, wanted in by_file.items():
    columns = ['episode_index', 'frame_index', *names]
    table = extra.read_table(
      path, columns, filters=[('episode_index', 'in', wanted)]
    )
    arrays = {
      name: extra.array(table.column(name), f'The column {name!r} of {path}')
      for name in columns
    }
    order = np.lexsort((arrays['frame_index'], arrays['episode_index']))
    for index in wanted:
      rows = order[arrays['episode_index'][order] == index]
      found[index] = {name: arrays[name][rows] for name in names}
  for x in episodes:
    for name in names:
      _check_column(data, x, name, found[x.index][name])
  return [found[x.index] for x in episodes]


def _check_column(data: Dataset, episode: Episode, name: str, x: np.ndarray):
  where = f'Episode {episode.index} of {data.folder}'
  if len(x) != episode.length:
    raise ValueError(
      f'{where} has {len(x)} steps in {episode.numbers.name}, and '
      f'{episode.length} by meta/episodes: record it again.'
    )
  if np.issubdtype(x.dtype, np.floating) and not np.isfinite(x).all():
    raise ValueError(
      f'{where} has numbers in {name!r} that are not finite: leave it out.'
    )
