"""Pictures of an episode, from videos or from columns of pictures."""

import numpy as np

from rlinf_jax.data.episode_files import stored_picture
from rlinf_jax.data.lerobot import extra, layout, places


def read(
  data: layout.Dataset, episode: places.Episode, camera: str
) -> np.ndarray:
  """The picture of each step, uint8 [T, rows, columns, 3].

  Raises:
    ValueError: if a step has no picture, or one of another size than
      meta/info.json says.
  """
  feature = data.features[camera]
  if feature.dtype == 'video':
    found = _from_video(data, episode, camera)
  else:
    found = _from_column(data, episode, camera)
  out = np.empty((episode.length, *feature.shape), np.uint8)
  seen = np.zeros(episode.length, bool)
  for t, picture in found:
    if not 0 <= t < episode.length:
      raise ValueError(
        f'Episode {episode.index} of {data.folder} has a picture of step {t}, '
        f'and {episode.length} steps by meta: record it again.'
      )
    if picture.shape != feature.shape:
      raise ValueError(
        f'The camera {camera!r} has pictures of {[*picture.shape]} in episode '
        f'{episode.index} of {data.folder}, and of {[*feature.shape]} by '
        'meta/info.json: record all at one size.'
      )
    out[t], seen[t] = picture, True
  if not seen.all():
    raise ValueError(
      f'Step {int(seen.argmin())} of episode {episode.index} of {data.folder} '
      f'has no picture of the camera {camera!r}: record it again.'
    )
  return out


def _from_video(data: layout.Dataset, episode: places.Episode, camera: str):
  """Yields each step and its picture, which is the nearest in time.

  A step comes again where a later frame is nearer.
  """
  path, start = episode.videos[camera]
  last, distance = -1, 0.0
  for second, frame in extra.decoded(path, start):
    at = (second - start) * data.fps
    t = round(at)
    if t >= episode.length:
      return
    if t >= 0 and (t > last or abs(at - t) < distance):
      last, distance = t, abs(at - t)
      yield t, frame.to_ndarray(format='rgb24')


def _from_column(data: layout.Dataset, episode: places.Episode, camera: str):
  """Yields each step and its picture, which is stored with the numbers."""
  columns = ['frame_index', camera]
  table = extra.read_table(
    episode.numbers, columns, filters=[('episode_index', '=', episode.index)]
  )
  for row in table.to_pylist():
    stored, t = row[camera], row['frame_index']
    content = stored.get('bytes') if isinstance(stored, dict) else None
    try:
      yield t, stored_picture.decode(content)
    except ValueError as error:
      raise ValueError(
        f'Step {t} of episode {episode.index} of {data.folder} has no picture '
        f'of the camera {camera!r} that can be read: record it again. {error}'
      ) from error
