r"""π0 and π0.5 of openpi's JAX checkpoints, as folders of safetensors.

  python -m rlinf_jax.prepare.openpi_model CHECKPOINT FOLDER

CHECKPOINT is a folder with `params`, which orbax has written, and usually
`assets`, statistics of data sets. Its arrays are converted once; everything
else reads the new folder. All of them are in memory at a time, 13 GB.
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
  out = pathlib.Path(folder)
  if out.exists():
    raise FileExistsError(f'{out} exists: name a new folder.')
  tree = read(checkpoint)
  config = config or pi0.published(adaptive=ADAPTIVE in tree)
  params = pi0_openpi.params(config, tree)
  pi0_files.write(out, params, config)
  assets = pathlib.Path(checkpoint) / normalization.ASSETS
  if assets.is_dir():
    shutil.copytree(assets, out / normalization.ASSETS)
  return config


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


def main(checkpoint: str, folder: str):
  """Converts the checkpoint that the command line names."""
  config = convert(checkpoint, folder)
  print(f'{"π0.5" if config.adaptive else "π0"} is in {folder}.')


if __name__ == '__main__':
  with startup.ended():
    command_line.run(main, 'CHECKPOINT', 'FOLDER')
