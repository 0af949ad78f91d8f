"""A data set in the RLDS format, as `base.Folder`.

RLDS (arXiv:2111.02767) is how Open X-Embodiment and OpenVLA publish episodes:
tensorflow_datasets writes each as a record of a TFRecord file; features.json
says what it has, and dataset_info.json which files there are. TensorFlow is not
needed to read them.
"""

from collections.abc import Iterator, Mapping, Sequence
import functools
import pathlib
from typing import Any, NamedTuple

import numpy as np

from rlinf_jax.data.episode_files import base, stored_picture
from rlinf_jax.data.rlds import records, schema
from stages.models.files import weights

FEATURES, INFO = 'features.json', 'dataset_info.json'
NAME = '{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}'  # By default.
TASK = 'task_index'
# The cameras of an episode are read one after the other.
_last_read = functools.lru_cache(maxsize=1)(records.values)


class Episode(NamedTuple):
  """An episode, in memory but for its pictures.

  Attributes:
    index: its number.
    length: its steps.
    record: where it is stored.
    numbers: arrays [T, n] by feature, and the number of each instruction.
  """

  index: int
  length: int
  record: records.Record
  numbers: dict[str, np.ndarray]


def read(root: pathlib.Path, split: str) -> base.Folder:
  """Describes the episodes of a split, such as 'train', with all their steps.

  Each record is read once, for its instruction and its numbers, which stay in
  memory. As in OpenVLA, the last step of an episode is one like all others.

  Raises:
    FileNotFoundError: if a file is missing.
    ImportError: without google-crc32c or protobuf.
    ValueError: for files that are damaged, or not of the format.
  """
  described = schema.read(root / FEATURES)
  tasks: dict[str, int] = {}
  found = []
  info = _info(root)
  paths = [*_files(root, info, split)]
  for path in paths:
    for record in records.find(path):
      found.append(_episode(len(found), record, described, tasks))
  if not found:
    raise ValueError(f'{root} has no episodes in its split {split!r}.')
  return base.Folder(
    root,
    info['name'],  # That of the folder is a version.
    described.features,
    tuple(found),
    {number: text for text, number in tasks.items()},
    read_numbers=_numbers,
    read_pictures=functools.partial(_pictures, described),
    files=lambda cameras: paths,
  )


def _info(root: pathlib.Path) -> Mapping[str, Any]:
  """The content of dataset_info.json, with the name of the data set.

  Raises:
    FileNotFoundError: without it.
    ValueError: if it has no name.
  """
  path = root / INFO
  if not path.is_file():
    raise FileNotFoundError(
      f'There is no {path}: copy the whole folder of the version.'
    )
  raw = weights.read_json(path)
  raw = raw if isinstance(raw, Mapping) else {}
  if not isinstance(raw.get('name'), str):
    raise ValueError(
      f'{path} has no name of the data set: copy the whole folder of the '
      'version.'
    )
  return raw


def _files(
  root: pathlib.Path, raw: Mapping[str, Any], split: str
) -> Iterator[pathlib.Path]:
  """Yields the files of the split, as dataset_info.json counts them.

  Raises:
    ValueError: if it does not name TFRecord files of this split.
  """
  path = root / INFO
  kind = raw.get('fileFormat') or 'tfrecord'
  if kind != 'tfrecord':
    raise ValueError(
      f'{root} has files of the format {kind!r}, and tfrecord is read here: '
      "prepare the data set with file_format='tfrecord'."
    )
  splits = raw.get('splits')
  splits = splits if isinstance(splits, list) else []
  known = {x.get('name'): x for x in splits if isinstance(x, Mapping)}
  lengths = known.get(split, {}).get('shardLengths')
  if not isinstance(lengths, list):
    raise ValueError(
      f'{path} does not name the files of a split {split!r}; it has the splits '
      f'{", ".join(map(str, known)) or "none"}.'
    )
  template = known[split].get('filepathTemplate') or NAME
  for shard in range(len(lengths)):
    values = {
      'DATASET': raw['name'],
      'SPLIT': split,
      'FILEFORMAT': kind,
      'SHARD_X_OF_Y': f'{shard:05d}-of-{len(lengths):05d}',
    }
    file = str(template)
    for key, value in values.items():
      file = file.replace(f'{{{key}}}', value)
    if not (root / file).resolve().is_relative_to(root.resolve()):
      raise ValueError(f'{path} names {file}, outside of the folder.')
    yield root / file


def _episode(
  index: int,
  record: records.Record,
  described: schema.Schema,
  tasks: dict[str, int],
) -> Episode:
  """An episode; its instructions are added to `tasks`, which numbers them."""
  stored = records.values(record)
  texts = stored.get(described.instruction, ())
  where = f'Episode {index} of {record.path}'
  if not texts:
    raise ValueError(
      f'{where} has no steps with {described.instruction!r}: leave it out.'
    )
  numbered = [_number(where, x, tasks) for x in texts]
  numbers = {TASK: np.array(numbered)}
  for name, feature in described.features.items():
    key = described.keys[name]
    values = stored.get(key, ())
    if feature.dtype in base.PICTURES:
      _check_count(where, key, len(values), len(texts))
      continue
    shape = len(texts), *feature.shape
    _check_count(where, key, len(values), int(np.prod(shape)))
    x = np.array(values, feature.dtype).reshape(shape)
    if not np.isfinite(x).all():
      raise ValueError(
        f'{where} has numbers in {name!r} that are not finite: leave it out.'
      )
    numbers[name] = x
  return Episode(index, len(texts), record, numbers)


def _number(where: str, text: Any, tasks: dict[str, int]) -> int:
  """The number of an instruction."""
  try:
    return tasks.setdefault(text.decode('utf-8'), len(tasks))
  except (AttributeError, UnicodeDecodeError) as error:
    raise ValueError(
      f'{where} has an instruction that is no UTF-8 text: {text!r:.40}.'
    ) from error


def _check_count(where: str, key: str, got: int, want: int):
  if got != want:
    raise ValueError(
      f'{where} has {got} values of {key!r}, and {want} are expected for its '
      f'steps by {FEATURES}: prepare the data set again.'
    )


def _numbers(
  episodes: Sequence[Episode], names: Sequence[str]
) -> list[dict[str, np.ndarray]]:
  """Columns of episodes, as `base.Folder.numbers`."""
  return [{name: x.numbers[name] for name in names} for x in episodes]


def _pictures(
  described: schema.Schema, episode: Episode, camera: str
) -> np.ndarray:
  """The picture of each step, uint8 [T, rows, columns, 3].

  Raises:
    ValueError: if one cannot be decoded, or has another size than features.json
      says.
  """
  feature, key = described.features[camera], described.keys[camera]
  out = np.empty((episode.length, *feature.shape), np.uint8)
  stored = _last_read(episode.record)[key]
  for t, content in enumerate(stored):
    where = (
      f'Step {t} of episode {episode.index} of {episode.record.path}, camera '
      f'{camera!r}'
    )
    try:
      picture = stored_picture.decode(content)
    except ValueError as error:
      raise ValueError(f'{where}: {error}') from error
    if picture.shape != feature.shape:
      raise ValueError(
        f'{where}: the picture is of {[*picture.shape]}, and of '
        f'{[*feature.shape]} by {FEATURES}: prepare the data set again.'
      )
    out[t] = picture
  return out
