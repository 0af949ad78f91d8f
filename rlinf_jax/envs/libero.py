"""LIBERO as a Env: tasks of a kitchen table, with fixed initial states.

Environment i is of task i // `group_size` modulo the tasks that are given, and
the episode of a seed begins in the initial state of its number, modulo how many
there are; so seeds 0 … 49 are the benchmark's own fifty attempts.
"""

from collections.abc import Mapping, Sequence
import importlib.util
import os
import pathlib
import tempfile

import numpy as np

from rlinf_jax.envs import simulator

ASSETS = 'LIBERO_ASSETS'  # The variable that says where meshes are.
CAMERAS = {'front': 'agentview', 'wrist': 'robot0_eye_in_hand'}
ARM = 'robot0_proprio-state'
THINGS = 'object-state'
LETTERS = 128  # Bytes of an instruction.
SETTLE = 10  # Steps until things that were put down lie still.
VIDEO = 160  # Pixels along each edge of a picture for people.
STILL = np.array([0, 0, 0, 0, 0, 0, -1.0])  # Hold; the gripper open.


def env(suite: str, num_envs: int, num_processes: int = 1, **settings):
  """An Env of `num_envs` environments of a suite, in processes of their own.

  Args:
    suite: such as 'libero_spatial'.
    num_envs: how many environments.
    num_processes: to spread them over.
    **settings: those of `rlinf_jax.envs.pool.Pool` by their names there, all
      others of `make`.
  """
  from rlinf_jax.envs import env_pool  # Not in a worker: it imports JAX.

  return env_pool.env(make, num_envs, num_processes, suite=suite, **settings)


def make(
  index: int,
  suite: str,
  *,
  task_ids: Sequence[int] = (0,),
  group_size: int = 1,
  horizon: int = 300,
  images: bool = False,
  image_size: int = 128,
  fast_rendering: bool = True,
) -> simulator.Environment:
  """One environment.

  Without pictures what is seen is one vector, of the arm and of all that lies
  on the table; it is as long as the task has things, so several tasks go
  together only where they have as many. With pictures it is a dict: 'state' of
  the arm alone, 'image' by camera, and 'instruction', UTF-8 and zeros.

  Args:
    index: of the environment; it chooses the task.
    suite: such as 'libero_spatial'.
    task_ids: numbers of tasks in the suite.
    group_size: adjacent environments of one task, such as GRPO's group.
    horizon: steps after which an episode is truncated.
    images: show what cameras see.
    image_size: of pictures, in pixels.
    fast_rendering: draw no shadows and no reflections.
  """
  names = _installed(suite)
  task = task_ids[index // group_size % len(task_ids)]
  if not 0 <= task < len(names):
    raise simulator.UnavailableError(
      f'{suite!r} has tasks 0 … {len(names) - 1}, and no task {task}.'
    )
  return Libero(suite, names[task], horizon, images, image_size, fast_rendering)


class Libero:
  """An environment of LIBERO, as a worker steps it."""

  def __init__(self, suite, name, horizon, images, image_size, fast_rendering):
    """Builds the scene, and reads its initial states."""
    import libero.libero as package
    from libero.libero import benchmark, envs
    import torch

    root = pathlib.Path(package.__file__).parent
    states = root / 'init_files' / suite / f'{name}.pruned_init'
    # Its own pickles, of NumPy arrays.
    self._states = torch.load(states, weights_only=False)
    self._env = envs.env_wrapper.ControlEnv(
      str(root / 'bddl_files' / suite / f'{name}.bddl'),
      use_camera_obs=images,
      has_offscreen_renderer=images,
      camera_names=list(CAMERAS.values()),
      camera_heights=image_size,
      camera_widths=image_size,
      ignore_done=True,  # Ends are ours to tell.
      hard_reset=False,  # A scene is built once; states differ, and no more.
    )
    self._images, self._fast_rendering, self._time = images, fast_rendering, 0
    # What policies are given: the file's name, not the scene's own wording.
    said = benchmark.grab_language_from_filename(f'{name}.bddl')
    text = said.encode()[:LETTERS]
    self._text = np.frombuffer(text.ljust(LETTERS, b'\0'), np.uint8)
    low, high = self._env.env.action_spec
    self._renderer = None
    self.spec = simulator.Spec(
      *(_like(self.reset(0)), np.float32(low), np.float32(high), horizon),
      simulator.Array((VIDEO, VIDEO, 3), 'uint8'),
    )

  def reset(self, seed: int) -> simulator.Tree:
    self._time = 0
    np.random.seed(seed)  # It draws from there.
    self._env.reset()
    obs = self._env.set_init_state(self._states[seed % len(self._states)])
    if self._images and self._fast_rendering:
      _plain(self._env.sim._render_context_offscreen.scn)
    for _ in range(SETTLE):
      obs, *_ = self._env.step(STILL)
    return self._seen(obs)

  def step(self, action_A: np.ndarray) -> simulator.Step:
    obs, reward, _, _ = self._env.step(action_A)
    self._time += 1
    success = bool(self._env.check_success())
    late = self._time >= self.spec.horizon
    return simulator.Step(self._seen(obs), reward, success, late, success)

  def draw(self) -> np.ndarray:
    import mujoco

    model, data = self._env.sim.model._model, self._env.sim.data._data
    if self._renderer is None:
      try:
        self._renderer = mujoco.Renderer(model, VIDEO, VIDEO)
      except Exception as error:  # noqa: BLE001 Of whatever finds no screen.
        raise simulator.UnavailableError(
          f'MuJoCo cannot draw here ({error}): install libegl1 and Mesa, and '
          'leave MUJOCO_GL unset, or libosmesa6 and set MUJOCO_GL=osmesa'
        ) from None
    solid = mujoco.MjvOption()
    solid.geomgroup[0] = 0  # The shapes that collide, which are another set.
    self._renderer.update_scene(data, _viewpoint(model, data), solid)
    if self._fast_rendering:
      _plain(self._renderer.scene)
    return self._renderer.render()

  def close(self):
    if self._renderer is not None:
      self._renderer.close()
    self._env.close()

  def _seen(self, obs: Mapping[str, np.ndarray]) -> simulator.Tree:
    if not self._images:
      return np.concatenate([obs[ARM], obs[THINGS]]).astype(np.float32)
    return {
      'state': obs[ARM].astype(np.float32),
      'image': {  # They come upside down.
        name: obs[f'{camera}_image'][::-1] for name, camera in CAMERAS.items()
      },
      'instruction': self._text,
    }


def _plain(scene):
  """Draws without shadows and reflections."""
  import mujoco

  for flag in (
    mujoco.mjtRndFlag.mjRND_SHADOW,
    mujoco.mjtRndFlag.mjRND_REFLECTION,
  ):
    scene.flags[flag] = 0


def _viewpoint(model, data):
  """From where people look: as the camera in front, but further from above."""
  import mujoco

  front = model.camera(CAMERAS['front']).id
  ahead_X = -data.cam_xmat[front].reshape(3, 3)[:, 2]
  far = 1.2
  viewpoint = mujoco.MjvCamera()
  viewpoint.lookat[:] = data.cam_xpos[front] + far * ahead_X + [0, 0, 0.12]
  viewpoint.distance = 1.1 * far
  viewpoint.azimuth = np.degrees(np.arctan2(ahead_X[1], ahead_X[0]))
  viewpoint.elevation = np.degrees(np.arcsin(ahead_X[2]))
  return viewpoint


def _like(obs) -> simulator.Tree:
  by_path = simulator.leaves(obs)
  return simulator.tree(
    {
      path: simulator.Array(x.shape, x.dtype.name)
      for path, x in by_path.items()
    }
  )


def _installed(suite: str) -> list[str]:
  """Names of a suite's tasks, once LIBERO is ready to build them."""
  # Without a screen; only what takes pictures opens it.
  os.environ.setdefault('MUJOCO_GL', 'egl')
  if importlib.util.find_spec('libero') is None:
    raise simulator.UnavailableError(
      f'{suite!r} needs LIBERO, which is not installed: say `make robots` in a '
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
  """LIBERO, which at its first import would ask where its files shall be."""
  if 'LIBERO_CONFIG_PATH' in os.environ:
    import libero.libero as package

    return package
  (folder,) = importlib.util.find_spec('libero').submodule_search_locations
  root = pathlib.Path(folder) / 'libero'
  says = {
    'benchmark_root': root,
    'bddl_files': root / 'bddl_files',
    'init_states': root / 'init_files',
    'datasets': root.parent / 'datasets',
    'assets': root / 'assets',
  }
  with tempfile.TemporaryDirectory() as config:
    lines = [f'{name}: {str(path)!r}\n' for name, path in says.items()]
    (pathlib.Path(config) / 'config.yaml').write_text(''.join(lines))
    os.environ['LIBERO_CONFIG_PATH'] = config
    try:
      import libero.libero as package
    finally:
      del os.environ['LIBERO_CONFIG_PATH']
  return package


def _assets(package: pathlib.Path) -> pathlib.Path:
  """Where meshes and textures are."""
  given = os.environ.get(ASSETS)
  folder = pathlib.Path(given) if given else package.parent / 'assets'
  if not (folder / 'scenes').is_dir():
    raise simulator.UnavailableError(
      f'There are no assets of LIBERO in {folder}: their `scenes` are not '
      'there. They are the data set lerobot/libero-assets of the Hugging Face '
      f'hub: download it, and set {ASSETS} to its folder.'
    )
  return folder.resolve()
