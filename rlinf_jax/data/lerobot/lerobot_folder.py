"""A folder in LeRobot's format, as `base.Folder`."""

import functools
import pathlib

from rlinf_jax.data.episode_files import base
from rlinf_jax.data.lerobot import layout, pictures


def read(path: pathlib.Path) -> base.Folder:
  """Describes a folder; errors are those of `layout.read`."""
  data = layout.read(str(path))
  return base.Folder(
    path,
    path.resolve().name,
    data.features,
    data.episodes,
    data.tasks,
    read_numbers=functools.partial(layout.numbers, data),
    read_pictures=functools.partial(pictures.read, data),
    files=functools.partial(layout.files, data),
  )
