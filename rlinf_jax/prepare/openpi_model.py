r"""Converts openpi's JAX checkpoints to folders of safetensors, and back.

  python -m rlinf_jax.prepare.openpi_model CHECKPOINT FOLDER
  python -m rlinf_jax.prepare.openpi_model FOLDER CHECKPOINT

CHECKPOINT is a folder with `params`, which orbax writes, and usually `assets`,
statistics of data sets. Its arrays are converted once, adapters added;
everything else reads FOLDER. What was trained is converted back by the second
command, which knows FOLDER by its safetensors. All arrays are in memory at a
time, 13 GB.
"""

import pathlib
import shutil

import numpy as np

from rlinf_jax import command_line, startup
from stages.models.files import weights
from stages.vla import normalization
from stages.vla.pi0 import pi0, pi0_files, pi0_openpi

PARAMS = 'params'
ADAPTIVE = 'time_mlp_in'  # A layer that π0.5 alone has.


def convert(
  checkpoint: str, folder: str, config: pi0.Config | None = None
) -> pi0.Config:
  """Writes a checkpoint of openpi as a folder that `pi0_files` reads.

  Args:
    checkpoint: folder of a checkpoint.
    folder: the new folder.
    config: sizes of the model; None for the published ones, of π0.5 if the
      checkpoint has its layers.

  Returns:
    The sizes.

  Raises:
    CheckpointError: if the folder holds no such checkpoint, or one of another
      model.
    FileExistsError: if the new folder exists.
  """
  out = _new(folder)
  tree = read(checkpoint)
  config = config or pi0.published(adaptive=ADAPTIVE in tree)
  params = pi0_openpi.params(config, tree)
  pi0_files.write(out, params, config)
  _copy_statistics(checkpoint, out)
  return config


def convert_back(
  folder: str, checkpoint: str, config: pi0.Config | None = None
) -> pi0.Config:
  """Writes a folder that `pi0_files` reads as a checkpoint of openpi.

  Args:
    folder: folder of safetensors.
    checkpoint: the new folder.
    config: sizes of the model; None for the published ones, of π0.5 if the
      folder has its layers.

  Returns:
    The sizes.

  Raises:
    CheckpointError: if the folder holds another model.
    FileExistsError: if the new folder exists.
  """
  import orbax.checkpoint as ocp

  out = _new(checkpoint)
  config = config or pi0.published(adaptive=pi0_files.is_adaptive(folder))
  tree = pi0_openpi.tree(config, pi0_files.read(folder, config))
  with ocp.PyTreeCheckpointer() as checkpointer:
    checkpointer.save(out.resolve() / PARAMS, {PARAMS: tree})
  _copy_statistics(folder, out)
  return config


def _new(folder: str) -> pathlib.Path:
  out = pathlib.Path(folder)
  if out.exists():
    raise FileExistsError(f'{out} exists: name a new folder.')
  return out


def _copy_statistics(source: str, out: pathlib.Path):
  assets = pathlib.Path(source) / normalization.ASSETS
  if assets.is_dir():
    shutil.copytree(assets, out / normalization.ASSETS)


def read(checkpoint: str) -> dict:
  """The parameter tree of a checkpoint, arrays in float32.

  Raises:
    CheckpointError: if orbax finds none there.
  """
  import jax
  import orbax.checkpoint as ocp

  path = pathlib.Path(checkpoint).resolve() / PARAMS
  if not path.is_dir():
    raise weights.CheckpointError(
      f'{checkpoint} has no folder {PARAMS!r}, which checkpoints of openpi in '
      'JAX have: name the folder above it. Others need no conversion.'
    )
  try:
    with ocp.PyTreeCheckpointer() as checkpointer:
      found = checkpointer.metadata(path).item_metadata.tree
      item = {PARAMS: found[PARAMS]}
      args = jax.tree.map(
        lambda _: ocp.RestoreArgs(restore_type=np.ndarray, dtype=np.float32),
        item,
      )
      restored = checkpointer.restore(
        path, ocp.args.PyTreeRestore(item=item, restore_args=args)
      )
  except Exception as error:
    raise weights.CheckpointError(
      f'orbax cannot read {path} ({error!r:.300}): copy the checkpoint again.'
    ) from error
  return restored[PARAMS]


def main(source: str, target: str):
  """Converts the folder that the command line names, by what it holds."""
  stored = pathlib.Path(source)
  back = any((stored / x).exists() for x in (weights.SINGLE, weights.INDEX))
  config = (convert_back if back else convert)(source, target)
  print(f'{"π0.5" if config.adaptive else "π0"} is in {target}.')


if __name__ == '__main__':
  with startup.ended():
    command_line.run(main, 'FOLDER', 'NEW_FOLDER')
