"""Contents of a LeRobot folder: episodes, cameras, instructions and numbers.

meta/info.json describes the features and the version of the format, which says
how the other files of meta list episodes and instructions.
"""

from collections.abc import Mapping, Sequence
import pathlib
from typing import Any, NamedTuple

import numpy as np

from rlinf_jax.data.episode_files import base
from rlinf_jax.data.lerobot import extra, places, version_2, version_3
from stages.models.files import weights

VERSIONS = {'v2': version_2, 'v3': version_3}


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
  episodes: tuple[places.Episode, ...]
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
  lists = VERSIONS[_major(info)]
  described = {name: _feature(name, x) for name, x in info['features'].items()}
  features = {name: x for name, x in described.items() if x is not None}
  videos = [name for name, x in features.items() if x.dtype == 'video']
  episodes = lists.episodes(root, info, videos)
  if not episodes:
    raise ValueError(
      f'{root / lists.EPISODES} lists no episodes: copy the folder again.'
    )
  counted = info.get('total_episodes', len(episodes))
  if counted != len(episodes):  # A list may be cut off at the end of a line.
    raise ValueError(
      f'{root / lists.EPISODES} lists {len(episodes)} episodes, and '
      f'total_episodes of {places.INFO} counts {counted!r:.40}: copy the '
      'folder again, or change the count if episodes were left out on purpose.'
    )
  return Dataset(
    root, float(info['fps']), features, episodes, lists.tasks(root)
  )


def _info(root: pathlib.Path) -> Mapping[str, Any]:
  """The content of meta/info.json, which must have all that is read."""
  path = root / places.INFO
  if not path.is_file():
    raise FileNotFoundError(
      f'There is no {path}: give the folder of a LeRobot data set, in which '
      'meta, data and videos are, or that of an RLDS data set, in which '
      'features.json is.'
    )
  raw = weights.read_json(path)
  raw = raw if isinstance(raw, Mapping) else {}
  if _major(raw) not in VERSIONS:
    raise ValueError(
      f'{root} is of version {raw.get("codebase_version")!r:.40} of the '
      f'format, and {" and ".join(VERSIONS)} are read here: convert it with '
      'LeRobot.'
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


def _major(info: Mapping[str, Any]) -> str:
  """The first part of the version, such as 'v2' of 'v2.1'."""
  return str(info.get('codebase_version')).partition('.')[0]


def _feature(name: str, raw: Any) -> base.Feature | None:
  """A feature, or None for pictures without three colors, or of depth.

  Pictures may have their colors first or last.
  """
  try:
    dtype, shape = str(raw['dtype']), tuple(map(int, raw['shape']))
  except (KeyError, TypeError, ValueError) as error:
    raise ValueError(
      f'The feature {name!r} of {places.INFO} has no dtype and shape: '
      'write it anew with LeRobot.'
    ) from error
  if dtype in base.PICTURES:
    if len(shape) != 3 or 3 not in (shape[0], shape[-1]) or _is_depth(raw):
      return None
    if shape[-1] != 3:
      shape = (*shape[1:], shape[0])
  return base.Feature(dtype, shape)


def _is_depth(raw: Mapping[str, Any]) -> bool:
  """Whether a camera's pictures are of depth, stored as if they had colors."""
  for name in 'info', 'video_info':
    details = raw.get(name)
    if isinstance(details, Mapping) and (
      details.get('video.is_depth_map') or details.get('is_depth_map')
    ):
      return True
  return False


def files(data: Dataset, cameras: Sequence[str]) -> list[pathlib.Path]:
  """The files of all episodes, with the videos of some cameras."""
  found = {}
  for episode in data.episodes:
    videos = [episode.videos[x][0] for x in cameras if x in episode.videos]
    found |= dict.fromkeys([episode.numbers, *videos])
  return [*found]


def numbers(
  data: Dataset, episodes: Sequence[places.Episode], names: Sequence[str]
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


def _check_column(
  data: Dataset, episode: places.Episode, name: str, x: np.ndarray
):
  where = f'Episode {episode.index} of {data.folder}'
  if len(x) != episode.length:
    raise ValueError(
      f'{where} has {len(x)} steps in {episode.numbers.name}, and '
      f'{episode.length} by meta: record it again.'
    )
  if np.issubdtype(x.dtype, np.floating) and not np.isfinite(x).all():
    raise ValueError(
      f'{where} has numbers in {name!r} that are not finite: leave it out.'
    )
