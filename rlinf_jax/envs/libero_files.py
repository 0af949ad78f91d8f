"""The installed package of LIBERO: its tasks, initial states, and meshes.

They are read without `libero.libero.benchmark`, which imports torch: that takes
each worker process over a CPU-second and 200 MB.
"""

import functools
import importlib.util
import os
import pathlib
import pickle
import re
import runpy
import tempfile
import zipfile

import numpy as np

from rlinf_jax.envs import simulator

ASSETS = 'LIBERO_ASSETS'  # Environment variable: the folder of meshes.
# Prefix of a task's name in LIBERO-100, such as 'KITCHEN_SCENE3_'.
SCENE = re.compile(r'^[A-Z_]+SCENE\d+_')


def tasks(suite: str) -> list[str]:
  """Task names of a suite; prepares LIBERO for building them.

  Raises:
    UnavailableError: if LIBERO, its assets or the suite are missing.
  """
  # Renders without a screen; only cameras use it.
  os.environ.setdefault('MUJOCO_GL', 'egl')
  if importlib.util.find_spec('libero') is None:
    raise simulator.UnavailableError(
      f'{suite!r} needs LIBERO, which is not installed: run `make robots` in a '
      'checkout, or pip install "rlinf-jax[libero]" and then pip install '
      '--no-deps hf-libero==0.1.4.'
    )
  try:
    package = _imported()
  except ImportError as error:
    raise simulator.UnavailableError(
      f'LIBERO is installed without what it needs ({error}): pip install '
      '"rlinf-jax[libero]".'
    ) from None
  root = pathlib.Path(package.__file__).parent
  package._assets_path_cache = str(_assets(root))
  suites = _suites(root)
  if suite not in suites:
    raise simulator.UnavailableError(
      f'LIBERO has no suite {suite!r}, but {", ".join(suites)}.'
    )
  return suites[suite]


@functools.cache
def _suites(root: pathlib.Path) -> dict[str, list[str]]:
  """Task names of each suite."""
  file = root / 'benchmark' / 'libero_suite_task_map.py'
  return runpy.run_path(str(file))['libero_task_map']


def initial_states(suite: str, name: str) -> np.ndarray:
  """Initial states of a task, one a row.

  The package has them as `torch.save` writes a NumPy array: a pickle in an
  archive.
  """
  import libero.libero as package

  root = pathlib.Path(package.__file__).parent
  file = root / 'init_files' / suite / f'{name}.pruned_init'
  with zipfile.ZipFile(file) as archive:
    return pickle.loads(archive.read('archive/data.pkl'))


def _imported():
  """Imports LIBERO, which would ask for paths when first imported."""
  if 'LIBERO_CONFIG_PATH' in os.environ:
    import libero.libero as package

    return package
  (folder,) = importlib.util.find_spec('libero').submodule_search_locations
  root = pathlib.Path(folder) / 'libero'
  paths = {
    'benchmark_root': root,
    'bddl_files': root / 'bddl_files',
    'init_states': root / 'init_files',
    'datasets': root.parent / 'datasets',
    'assets': root / 'assets',
  }
  with tempfile.TemporaryDirectory() as config:
    lines = [f'{name}: {str(path)!r}\n' for name, path in paths.items()]
    (pathlib.Path(config) / 'config.yaml').write_text(''.join(lines))
    os.environ['LIBERO_CONFIG_PATH'] = config
    try:
      import libero.libero as package
    finally:
      del os.environ['LIBERO_CONFIG_PATH']
  return package


def _assets(root: pathlib.Path) -> pathlib.Path:
  """The folder of meshes and textures."""
  given = os.environ.get(ASSETS)
  folder = pathlib.Path(given) if given else root / 'assets'
  if not (folder / 'scenes').is_dir():
    raise simulator.UnavailableError(
      f'There are no assets of LIBERO in {folder}: it has no `scenes`. '
      'They are the data set lerobot/libero-assets of the Hugging Face '
      f'hub: download it, and set {ASSETS} to its folder.'
    )
  return folder.resolve()


def instruction(name: str) -> str:
  """A task's name as words, without its scene; not the scene's own wording.

  It is `grab_language_from_filename` of `libero.libero.benchmark`.
  """
  return SCENE.sub('', name).replace('_', ' ')
