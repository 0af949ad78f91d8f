"""The installed package of LIBERO: its tasks, their texts, and meshes."""

import importlib.util
import os
import pathlib
import tempfile

from rlinf_jax.envs import simulator

ASSETS = 'LIBERO_ASSETS'  # Environment variable: the folder of meshes.


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
    from libero.libero.benchmark import libero_suite_task_map as suites
  except ImportError as error:
    raise simulator.UnavailableError(
      f'LIBERO is installed without what it needs ({error}): pip install '
      '"rlinf-jax[libero]".'
    ) from None
  package._assets_path_cache = str(_assets(pathlib.Path(package.__file__)))
  if suite not in suites.libero_task_map:
    raise simulator.UnavailableError(
      f'LIBERO has no suite {suite!r}, but {", ".join(suites.libero_task_map)}.'
    )
  return suites.libero_task_map[suite]


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


def _assets(package: pathlib.Path) -> pathlib.Path:
  """The folder of meshes and textures."""
  given = os.environ.get(ASSETS)
  folder = pathlib.Path(given) if given else package.parent / 'assets'
  if not (folder / 'scenes').is_dir():
    raise simulator.UnavailableError(
      f'There are no assets of LIBERO in {folder}: it has no `scenes`. '
      'They are the data set lerobot/libero-assets of the Hugging Face '
      f'hub: download it, and set {ASSETS} to its folder.'
    )
  return folder.resolve()


def instruction(name: str) -> str:
  """The file's name as words, not the scene's own wording."""
  from libero.libero import benchmark

  return benchmark.grab_language_from_filename(f'{name}.bddl')
