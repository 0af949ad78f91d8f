"""Reads folders of episodes; their files tell the format."""

import functools
import pathlib

from rlinf_jax.data.episode_files import base

TRAIN = 'train'


@functools.cache
def read(folder: str, split: str = TRAIN) -> base.Folder:
  """Describes a folder in LeRobot's format or in that of RLDS.

  Args:
    folder: the folder.
    split: the part of an RLDS data set; LeRobot's have one alone.

  Raises:
    FileNotFoundError: if it is neither, or if a file of its format is missing.
    ImportError: without the libraries that read the format.
    ValueError: for files that are not of the format.
  """
  from rlinf_jax.data.lerobot import lerobot_folder
  from rlinf_jax.data.rlds import rlds_folder

  root = pathlib.Path(folder)
  if (root / rlds_folder.FEATURES).is_file():
    return rlds_folder.read(root, split)
  versions = sorted(root.glob(f'*/{rlds_folder.FEATURES}'))
  if versions:
    raise FileNotFoundError(
      f'{root} has versions of an RLDS data set: give the folder of one, such '
      f'as {versions[-1].parent}.'
    )
  if split != TRAIN:
    raise ValueError(
      f'{root} is a LeRobot folder, which has no split {split!r}: leave '
      '`held_out_split` out, and its last episodes are held out.'
    )
  return lerobot_folder.read(root)
