"""A folder of episodes of a robot, whichever format it has."""

from collections.abc import Callable, Sequence
import pathlib
from typing import NamedTuple, Protocol

import numpy as np

from rlinf_jax.config import suggestions
from stages import source_files

PICTURES = ('video', 'image')  # Types of the features that are pictures.
ACTION, STATE = 'action', 'observation.state'  # Names of features.


class Feature(NamedTuple):
  """A feature that is recorded at each step.

  Attributes:
    dtype: 'video' or 'image' for pictures, or a type of numbers.
    shape: of pictures, rows, columns and colors.
  """

  dtype: str
  shape: tuple[int, ...]


class Episode(Protocol):
  """An episode; each format also knows where it is stored.

  Attributes:
    index: its number.
    length: its steps.
  """

  index: int
  length: int


class Folder(NamedTuple):
  """Episodes on disk.

  Attributes:
    path: the folder.
    name: of the data set.
    features: by name.
    episodes: in the order of their numbers.
    tasks: instruction of each task index.
    read_numbers: `episodes, names -> columns`, for each episode a dictionary of
      arrays [T, …] by name. The column 'task_index' has the number of each
      step's instruction.
    read_pictures: `episode, camera -> pictures`, uint8 [T, rows, columns, 3].
    files: `cameras -> paths` of the files with the episodes' numbers and the
      pictures of these cameras, in a fixed order.
  """

  path: pathlib.Path
  name: str
  features: dict[str, Feature]
  episodes: Sequence[Episode]
  tasks: dict[int, str]
  read_numbers: Callable[
    [Sequence[Episode], Sequence[str]], list[dict[str, np.ndarray]]
  ]
  read_pictures: Callable[[Episode, str], np.ndarray]
  files: Callable[[Sequence[str]], Sequence[pathlib.Path]]

  def digest(self, cameras: Sequence[str]) -> np.int64:
    """A digest of the episodes, with the pictures of some cameras.

    Raises:
      FileNotFoundError: if a file is missing.
    """
    lengths = [episode.length for episode in self.episodes]
    described = f'{lengths} {self.tasks} {self.features}'
    return source_files.digest_of_many(self.files(cameras), described)

  @property
  def cameras(self) -> tuple[str, ...]:
    """Names of the features that are pictures, as the folder orders them."""
    return tuple(
      name for name, x in self.features.items() if x.dtype in PICTURES
    )

  def check_feature(self, name: str, what: str, *, pictures: bool):
    """Refuses a feature that is missing, of the other kind or of another rank.

    Raises:
      ValueError: names those that it has.
    """
    known = [
      key
      for key, x in self.features.items()
      if (x.dtype in PICTURES) == pictures and len(x.shape) == 1 + 2 * pictures
    ]
    if name not in known:
      raise ValueError(
        f'{self.path} has no {what} {name!r}, but '
        f'{suggestions.join_names(known) or "none"}: name one of these.'
      )
