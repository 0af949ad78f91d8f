"""Writes episodes as a LeRobot folder of version 3."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
import contextlib
import json
import os
import pathlib
import shutil
from typing import Any, NamedTuple

import numpy as np

from rlinf_jax.data.episode_files import base
from rlinf_jax.data.lerobot import extra, places, version_3

CODECS = {'libsvtav1': 'av1', 'libx264': 'h264'}  # Encoders and their formats.
# As LeRobot encodes: every second frame is a key frame, at a fixed quality.
OPTIONS = {'g': '2', 'crf': '30'}
CHUNK, FILE = 'chunk_index', 'file_index'
NAME = 'chunk-{chunk_index:03d}/file-{file_index:03d}'
PATHS = {
  'data_path': f'data/{NAME}.parquet',
  'video_path': f'videos/{{video_key}}/{NAME}.mp4',
}


class Episode(NamedTuple):
  """An episode to write.

  Attributes:
    task: the instruction.
    action: float32 [T, A].
    state: float32 [T, O].
    images: by camera, such as 'observation.images.top': uint8
      [T, rows, columns, 3].
  """

  task: str
  action: np.ndarray
  state: np.ndarray
  images: Mapping[str, np.ndarray]


def write(
  folder: str | pathlib.Path,
  episodes: Iterable[Episode],
  *,
  fps: int,
  codec: str = 'libsvtav1',
  episodes_a_file: int = 50,
):
  """Writes a folder, which appears when it is complete.

  Args:
    folder: where to write; it must not exist.
    episodes: of one shape, but for their lengths.
    fps: steps a second.
    codec: a key of `CODECS`.
    episodes_a_file: episodes of each parquet file and of each video.

  Raises:
    FileExistsError: if the folder exists.
    ValueError: without episodes, with pictures that cannot be encoded, or for
      episodes that differ in shape or lack something of a step.
  """
  folder = pathlib.Path(folder)
  if folder.exists():
    raise FileExistsError(f'{folder} exists: give the path of a new folder.')
  episodes = [*episodes]
  if not episodes:
    raise ValueError(f'There are no episodes to write to {folder}.')
  if not (fps > 0 and episodes_a_file > 0):
    raise ValueError(
      f'{fps} steps a second and {episodes_a_file} episodes a file are given: '
      'give more than 0 of each.'
    )
  _check_pictures(episodes, codec)
  _check_steps(episodes)
  part = folder.with_name(f'{folder.name}.part')
  shutil.rmtree(part, ignore_errors=True)  # Of a program that was ended.
  try:
    _write(part, episodes, fps, codec, episodes_a_file)
    part.replace(folder)
  except BaseException:
    shutil.rmtree(part, ignore_errors=True)
    raise


def _check_pictures(episodes: Sequence[Episode], codec: str):
  """Refuses pictures that differ in size, or that no codec takes.

  Raises:
    ValueError: names the episode and the camera.
  """
  if codec not in CODECS:
    raise ValueError(
      f'There is no codec {codec!r}: give one of {", ".join(CODECS)}.'
    )
  first = {name: x.shape[1:] for name, x in episodes[0].images.items()}
  for i, episode in enumerate(episodes):
    found = {name: x.shape[1:] for name, x in episode.images.items()}
    if found != first:
      raise ValueError(
        f'Episode {i} has pictures of {found}, and episode 0 of {first}: give '
        'all episodes the same cameras and sizes.'
      )
  for name, shape in first.items():
    rows, columns, *colors = shape
    if colors != [3]:
      raise ValueError(
        f'The camera {name!r} has pictures of {[*shape]}, expected rows, '
        'columns and three colors.'
      )
    # Colors are stored for squares of two by two pixels.
    if codec == 'libx264' and (rows % 2 or columns % 2):
      raise ValueError(
        f'The camera {name!r} has pictures of {rows} x {columns}, and '
        'libx264 takes even sizes alone: crop or resize them, or give codec '
        "'libsvtav1'."
      )


def _check_steps(episodes: Sequence[Episode]):
  """Refuses episodes whose steps lack something, or differ in shape.

  One picture too many would belong to the first step of the next episode.

  Raises:
    ValueError: names the episode.
  """
  first = episodes[0].action.shape[1:], episodes[0].state.shape[1:]
  for i, x in enumerate(episodes):
    sizes = {'actions': len(x.action), 'states': len(x.state)}
    sizes |= {f'pictures of {name}': len(y) for name, y in x.images.items()}
    if {*sizes.values()} != {max(1, len(x.action))}:
      raise ValueError(
        f'Episode {i} has '
        f'{", ".join(f"{n} {what}" for what, n in sizes.items())}: give one of '
        'each for each step, without an observation after the last action.'
      )
    if (found := (x.action.shape[1:], x.state.shape[1:])) != first:
      raise ValueError(
        f'Episode {i} has actions and states of {found}, and episode 0 of '
        f'{first}: give all episodes the same.'
      )


def _write(root: pathlib.Path, episodes, fps, codec, episodes_a_file):
  tasks = [*dict.fromkeys(x.task for x in episodes)]
  rows, start = [], 0
  for file, first in enumerate(range(0, len(episodes), episodes_a_file)):
    part = episodes[first : first + episodes_a_file]
    at = {CHUNK: 0, FILE: file}
    seconds = dict.fromkeys(part[0].images, 0.0)
    columns = []
    for i, x in enumerate(part, first):
      length = len(x.action)
      columns.append(_numbers(i, start, fps, tasks.index(x.task), x))
      rows.append(_row(i, start, length, fps, at, seconds, x))
      start += length
    _write_table(root / PATHS['data_path'].format(**at), columns)
    for camera in part[0].images:
      path = root / PATHS['video_path'].format(video_key=camera, **at)
      frames = (frame for x in part for frame in x.images[camera])
      _encode(path, frames, fps, codec)
  first = NAME.format(chunk_index=0, file_index=0)
  _write_rows(root / version_3.EPISODES / f'{first}.parquet', rows)
  _write_tasks(root / version_3.TASKS, tasks)
  _write_info(root, episodes, len(tasks), start, fps, codec)


def _numbers(
  index: int, start: int, fps: int, task: int, x: Episode
) -> dict[str, Any]:
  """Columns of an episode in the parquet file."""
  T = len(x.action)
  return {
    base.ACTION: x.action.astype(np.float32),
    base.STATE: x.state.astype(np.float32),
    'timestamp': (np.arange(T) / fps).astype(np.float32),
    'frame_index': np.arange(T),
    'episode_index': np.full(T, index),
    'index': start + np.arange(T),
    'task_index': np.full(T, task),
  }


def _row(index, start, length, fps, at, seconds, x: Episode) -> dict[str, Any]:
  """The row of meta/episodes; moves `seconds` to the end of the episode."""
  row = {
    'episode_index': index,
    'tasks': [x.task],
    'length': length,
    'dataset_from_index': start,
    'dataset_to_index': start + length,
    **{f'data/{k}': v for k, v in at.items()},
    **{f'meta/episodes/{k}': 0 for k in at},
  }
  for camera, second in seconds.items():
    row |= {f'videos/{camera}/{k}': v for k, v in at.items()}
    row[f'videos/{camera}/from_timestamp'] = second
    row[f'videos/{camera}/to_timestamp'] = second + length / fps
    seconds[camera] = second + length / fps
  return row


def _write_table(path: pathlib.Path, episodes: list[dict[str, Any]]):
  """Writes columns, each the arrays of several episodes."""
  pyarrow, _ = extra.parquet()
  found = {}
  for name in episodes[0]:
    x = np.concatenate([episode[name] for episode in episodes])
    column = pyarrow.array(x.reshape(-1))
    if x.ndim > 1 and x.shape[1] > 1:  # One number is no list.
      column = pyarrow.FixedSizeListArray.from_arrays(column, x.shape[1])
    found[name] = column
  _save(path, pyarrow.table(found))


def _write_rows(path: pathlib.Path, rows: list[dict[str, Any]]):
  pyarrow, _ = extra.parquet()
  _save(path, pyarrow.Table.from_pylist(rows))


def _write_tasks(path: pathlib.Path, tasks: list[str]):
  """Writes instructions as pandas does a table whose index they are."""
  pyarrow, _ = extra.parquet()
  index = '__index_level_0__'
  table = pyarrow.table({'task_index': [*range(len(tasks))], index: tasks})
  columns = [
    {
      'name': name,
      'field_name': name or index,
      'pandas_type': kind,
      'numpy_type': numpy_type,
      'metadata': None,
    }
    for name, kind, numpy_type in (
      ('task_index', 'int64', 'int64'),
      (None, 'unicode', 'object'),
    )
  ]
  meta = {'index_columns': [index], 'column_indexes': [], 'columns': columns}
  _save(path, table.replace_schema_metadata({'pandas': json.dumps(meta)}))


def _save(path: pathlib.Path, table):
  path.parent.mkdir(parents=True, exist_ok=True)
  extra.parquet()[1].write_table(table, path)


def _encode(path: pathlib.Path, frames: Iterable[np.ndarray], fps, codec: str):
  """Encodes pictures as a video."""
  av = extra.av()
  os.environ.setdefault('SVT_LOG', '1')  # The encoder of AV1 is talkative.
  path.parent.mkdir(parents=True, exist_ok=True)
  with _own_scheduling(), av.open(str(path), 'w') as container:
    stream = None
    for i, picture in enumerate(frames):
      if stream is None:
        stream = container.add_stream(codec, rate=fps, options=OPTIONS)
        stream.height, stream.width = picture.shape[:2]
        stream.pix_fmt = 'yuv420p'
      frame = av.VideoFrame.from_ndarray(picture, format='rgb24')
      frame.pts = i  # Else a file may refuse the packets of a busy encoder.
      container.mux(stream.encode(frame))
    container.mux(stream.encode())


@contextlib.contextmanager
def _own_scheduling() -> Iterator[None]:
  """Gives this thread its scheduling policy back.

  Run by root, SVT-AV1 makes the thread that calls it a real-time one, and
  leaves it so. That thread, and those that it then starts, would run before
  all other processes of the machine.
  """
  policy, param = os.sched_getscheduler(0), os.sched_getparam(0)
  try:
    yield
  finally:
    os.sched_setscheduler(0, policy, param)


def _write_info(root, episodes, tasks: int, frames: int, fps: int, codec: str):
  """Writes meta/info.json."""
  first = episodes[0]
  features = {
    base.ACTION: _vector('float32', first.action.shape[1]),
    base.STATE: _vector('float32', first.state.shape[1]),
  }
  for camera, x in first.images.items():
    features[camera] = {
      'dtype': 'video',
      'shape': [*x.shape[1:]],
      'names': ['height', 'width', 'channels'],
      'info': {
        'video.height': x.shape[1],
        'video.width': x.shape[2],
        'video.codec': CODECS[codec],
        'video.pix_fmt': 'yuv420p',
        'video.is_depth_map': False,
        'video.fps': fps,
        'video.channels': 3,
        'has_audio': False,
      },
    }
  features['timestamp'] = _vector('float32', 1)
  for name in 'frame_index', 'episode_index', 'index', 'task_index':
    features[name] = _vector('int64', 1)
  info = {
    'codebase_version': 'v3.0',
    'robot_type': None,
    'total_episodes': len(episodes),
    'total_frames': frames,
    'total_tasks': tasks,
    'chunks_size': 1000,
    'data_files_size_in_mb': 100,
    'video_files_size_in_mb': 200,
    'fps': fps,
    'splits': {'train': f'0:{len(episodes)}'},
    **PATHS,
    'features': features,
  }
  path = root / places.INFO
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(json.dumps(info, indent=2))


def _vector(dtype: str, size: int) -> dict[str, Any]:
  return {'dtype': dtype, 'shape': [size], 'names': None}
