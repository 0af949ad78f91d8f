"""A source of demonstrations from episodes on disk, for behavior cloning."""

from collections.abc import Callable, Mapping, Sequence
import functools
from typing import Any

import jax
import numpy as np

from rlinf_jax.data.episode_files import base as base_lib
from rlinf_jax.data.episodes import chunks, folders, windows
from stages import base, ranges, source_files
from stages.vla import relative_actions as relative_lib

PREFIXES = 'observation.images.', 'observation.'


def cameras(folder: str, *, names: Sequence[str] | None = None) -> tuple:
  """Paths of pictures in observations, such as 'image/wrist'.

  Args:
    folder: a folder that `folders.read` reads.
    names: the features that are read, such as 'observation.images.wrist'; all
      that are pictures if None, in the order of the folder.

  Raises:
    ValueError: if the folder has no such feature, or two of one path.
  """
  return tuple(f'image/{_short(x)}' for x in _cameras(folder, names))


def only_camera(cameras: Sequence[str]) -> str:
  """The path of the picture in observations of a model that reads one.

  Args:
    cameras: the paths of all that are read, see `cameras`.

  Raises:
    ValueError: if there are several.
  """
  if len(cameras) != 1:
    raise ValueError(
      f'The model reads one picture, and the folder has {", ".join(cameras)}: '
      "name its feature, such as ('observation.images.top',) (CAMERAS in gin)."
    )
  return cameras[0]


def _short(name: str) -> str:
  for prefix in PREFIXES:
    name = name.removeprefix(prefix)
  return name


def _cameras(folder: str, names: Sequence[str] | None) -> tuple[str, ...]:
  data = folders.read(folder)
  for name in names or ():
    data.check_feature(name, 'camera', pictures=True)
  found = tuple(names or data.cameras)
  if not found:
    raise ValueError(
      f'{folder} has no pictures, which these models read: record cameras.'
    )
  by_path = {}
  for name in found:
    other = by_path.setdefault(_short(name), name)
    if other is not name:
      raise ValueError(
        f'{other!r} and {name!r} of {folder} would both be image/'
        f'{_short(name)} in observations: name one of them (CAMERAS in gin).'
      )
  return found


def source(
  folder: str,
  *,
  batch_size: ranges.PositiveInt,
  instructions: Callable[[Sequence[str]], base.Prompt],
  normalize: Callable[[np.ndarray], Any],
  camera_names: Sequence[str] | None = None,
  action: str = base_lib.ACTION,
  state: str | None = base_lib.STATE,
  relative_actions: relative_lib.RelativeActions = False,
  chunk: ranges.PositiveInt = 8,
  window_rows: ranges.PositiveInt = 1024,
  held_out_episodes: ranges.PositiveInt = 1,
  held_out_split: str | None = None,
  held_out_rows: ranges.PositiveInt = 128,
  held_out_batch: ranges.PositiveInt = 32,
  evaluation: base.Source | None = None,
) -> base.Source:
  """A source of random steps of the episodes of a folder.

  A batch is a `base.Demonstration`: pictures as bytes under 'image', the
  robot's state as it is recorded under 'state', the tokens of the episode's
  instruction under `base.PROMPT`, and the next `chunk` actions in the units of
  the model. Beyond the end of an episode, the last action is repeated.

  Pictures are decoded as training goes on, in a thread. Two windows are in
  memory at a time, of the pictures of `window_rows` steps each.

  Args:
    folder: a folder that `folders.read` reads, in LeRobot's format or in that
      of RLDS.
    batch_size: steps of a batch.
    instructions: encodes the texts of all tasks, such as `instructions.openvla`
      with the folder of the model.
    normalize: `actions [..., A] -> actions` in the units of the model, such as
      `action_tokens.normalizer` and `normalization.normalizer` return.
    camera_names: as `names` of `cameras`.
    action: name of the feature with actions.
    state: name of the feature with the robot's state; None for none.
    relative_actions: which numbers of actions are made relative to the state of
      their row, before they are normalized, see `relative_actions.mask`.
    chunk: Z, actions of a row.
    window_rows: most steps of a window.
    held_out_episodes: how many of the last episodes are evaluated on. They are
      not trained on.
    held_out_split: the split of an RLDS data set of which these are, such as
      'val'. All episodes of the split 'train' are then trained on. None if they
      are of the split 'train'.
    held_out_rows: steps of them that evaluations score, at equal distances.
    held_out_batch: steps of a batch of evaluation.
    evaluation: a source whose held-out batches are used, such as seeds of
      environments, in place of held-out steps.

  Raises:
    ImportError: without the libraries that read the folder.
    ValueError: if the folder lacks a feature, or has too few episodes.
  """
  data = folders.read(folder)
  shown = _cameras(folder, camera_names)
  vectors = [action, *([state] if state else ())]
  for name in vectors:
    data.check_feature(name, 'vector', pictures=False)
  other = data
  if held_out_split not in (None, folders.TRAIN):
    other = folders.read(folder, held_out_split)
  train = _train_episodes(data, held_out_episodes if other is data else 0)
  mask_A = chunks.relative_mask(data, action, state, relative_actions)
  load, load_held_out = (
    functools.partial(
      _load,
      part,
      shown,
      action,
      state,
      mask_A,
      chunk,
      _prompts(part, instructions),
      normalize,
    )
    for part in (data, other)
  )
  stream = windows.Windows(
    [x.length for x in train],
    window_rows,
    lambda window: load([train[i] for i in window]),
  )

  files = [
    source_files.Files([part.path], np.array([part.digest(shown)]))
    for part in ([data] if other is data else [data, other])
  ]

  def init(seed):
    state = {'seed': np.array(seed), 'batch': np.array(0)}
    return {**state, **source_files.entries(*files)}

  def next_batch(now, metrics):
    del metrics  # There is no curriculum.
    n = int(now['batch'])
    batch = stream.take(int(now['seed']), n * batch_size, batch_size)
    return {**now, 'batch': np.asarray(n + 1)}, batch

  @functools.cache
  def held_out():
    kept = load_held_out(other.episodes[-held_out_episodes:])
    return _batches(kept, held_out_rows, held_out_batch)

  return base.Source(
    init,
    next_batch,
    evaluation.held_out if evaluation else held_out,
    check=source_files.checker(*files),
  )


def _train_episodes(
  data: base_lib.Folder, held_out: int
) -> Sequence[base_lib.Episode]:
  """All episodes but the last ones.

  Raises:
    ValueError: if none is left.
  """
  count = len(data.episodes) - held_out
  if count < 1:
    raise ValueError(
      f'{data.path} has {len(data.episodes)} episodes, and {held_out} of them '
      'are held out: record more, or lower `held_out_episodes`.'
    )
  return data.episodes[:count]


def _batches(
  x: base.Demonstration, most_rows: int, size: int
) -> list[base.Demonstration]:
  """Batches of rows at equal distances."""
  rows = len(x.action)
  count = min(most_rows, rows)
  size = min(size, count)
  chosen = np.linspace(0, rows - 1, count - count % size).astype(int)
  return [
    jax.tree.map(lambda y, at=at: y[at], x)
    for at in np.split(chosen, len(chosen) // size)
  ]


def _prompts(
  data: base_lib.Folder, encode: Callable[[Sequence[str]], base.Prompt]
) -> dict[int, dict[str, np.ndarray]]:
  """The row of each task's tokens, by the number of the task."""
  prompt = encode([*data.tasks.values()])
  rows = {k: np.asarray(x) for k, x in prompt._asdict().items()}
  return {
    task: {k: x[i] for k, x in rows.items()}
    for i, task in enumerate(data.tasks)
  }


def _load(
  data: base_lib.Folder,
  shown: Sequence[str],
  action: str,
  state: str | None,
  mask_A: np.ndarray | None,
  chunk: int,
  prompts: Mapping[int, Any],
  normalize: Callable[[np.ndarray], Any],
  episodes: Sequence[base_lib.Episode],
) -> base.Demonstration:
  """All steps of episodes, one after the other."""
  names = ['task_index', action, *([state] if state else ())]
  found = []
  for episode, x in zip(
    episodes, data.read_numbers(episodes, names), strict=True
  ):
    tasks = x['task_index'].tolist()
    unknown = sorted({*tasks} - {*prompts})
    if unknown:
      raise ValueError(
        f'Episode {episode.index} of {data.path} has the task {unknown[0]}, '
        'for which the folder has no instruction: write it anew.'
      )
    obs = {
      'image': {
        _short(camera): data.read_pictures(episode, camera) for camera in shown
      },
      base.PROMPT: jax.tree.map(
        lambda *rows: np.stack(rows), *(prompts[task] for task in tasks)
      ),
    }
    here, moves = chunks.of_episode(x, action, state, mask_A, chunk)
    if here is not None:
      obs['state'] = here
    # A plan's flow may be recorded meanwhile, and these are numbers.
    with jax.ensure_compile_time_eval():
      moves = np.asarray(normalize(moves))
    found.append(base.Demonstration(obs, moves))
  return jax.tree.map(lambda *xs: np.concatenate(xs), *found)
