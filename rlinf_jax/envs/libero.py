"""LIBERO as an `Env`: manipulation tasks with fixed initial states.

Environment i runs the task i // `group_size`, modulo the number of tasks given.
The episode of a seed starts in the initial state of that number, modulo how
many there are: seeds 0 … 49 are the benchmark's own fifty attempts.
"""

from collections.abc import Mapping, Sequence
import importlib.util
import os
import pathlib
import tempfile

import numpy as np

from rlinf_jax.envs import simulator

ASSETS = 'LIBERO_ASSETS'  # Environment variable: the folder of meshes.
CAMERAS = {'front': 'agentview', 'wrist': 'robot0_eye_in_hand'}
ARM = 'robot0_proprio-state'
OBJECTS = 'object-state'
INSTRUCTION_SIZE = 128  # Bytes of an instruction.
SETTLE_STEPS = 10  # Steps after a reset until objects lie still.
VIDEO_SIZE = 160  # Pixels along each edge of a frame for people.
HOLD = np.array([0, 0, 0, 0, 0, 0, -1.0])  # No motion; the gripper open.


def env(suite: str, num_envs: int, num_processes: int = 1, **settings):
  """An Env of `num_envs` environments of a suite, in processes of their own.

  Args:
    suite: such as 'libero_spatial'.
    num_envs: how many environments.
    num_processes: to spread them over.
    **settings: those of `rlinf_jax.envs.processes.pool.EnvPool` by
      their names there, all others of `make`.
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
  """Builds one environment.

  The observation is one vector, the state of the arm and of all objects. Its
  length depends on the number of objects, so tasks can be mixed only where that
  agrees. With `images` it is a dict: 'state' of the arm alone, 'image' by
  camera, and 'instruction', UTF-8 bytes padded with zeros.

  Args:
    index: of the environment; it selects the task.
    suite: such as 'libero_spatial'.
    task_ids: numbers of the suite's tasks.
    group_size: adjacent environments of one task, such as GRPO's groups.
    horizon: steps after which an episode is truncated.
    images: whether observations have camera images.
    image_size: their edge, in pixels.
    fast_rendering: whether to leave out shadows and reflections.
  """
  names = _installed(suite)
  task = task_ids[index // group_size % len(task_ids)]
  if not 0 <= task < len(names):
    raise simulator.UnavailableError(
      f'{suite!r} has tasks 0 … {len(names) - 1}, and no task {task}.'
    )
  return Libero(suite, names[task], horizon, images, image_size, fast_rendering)


class Libero:
  """A LIBERO environment behind the `simulator.Environment` interface."""

  def __init__(self, suite, name, horizon, images, image_size, fast_rendering):
    """Builds the scene and reads its initial states."""
    import libero.libero as package
    from libero.libero import benchmark, envs
    import torch

    root = pathlib.Path(package.__file__).parent
    states = root / 'init_files' / suite / f'{name}.pruned_init'
    # LIBERO's own pickles, of NumPy arrays.
    self._states = torch.load(states, weights_only=False)
    self._env = envs.env_wrapper.ControlEnv(
      str(root / 'bddl_files' / suite / f'{name}.bddl'),
      use_camera_obs=images,
      has_offscreen_renderer=images,
      camera_names=list(CAMERAS.values()),
      camera_heights=image_size,
      camera_widths=image_size,
      ignore_done=True,  # `step` ends episodes.
      hard_reset=False,  # Build the scene once; only its state is reset.
    )
    self._images, self._fast_rendering, self._time = images, fast_rendering, 0
    # The instruction is the file's name, not the scene's own wording.
    instruction = benchmark.grab_language_from_filename(f'{name}.bddl')
    text = instruction.encode()[:INSTRUCTION_SIZE]
    self._text = np.frombuffer(text.ljust(INSTRUCTION_SIZE, b'\0'), np.uint8)
    low, high = self._env.env.action_spec
    self._renderer = None
    self.spec = simulator.Spec(
      obs=_obs_arrays(self.reset(0)),
      low=np.float32(low),
      high=np.float32(high),
      horizon=horizon,
      image=simulator.Array((VIDEO_SIZE, VIDEO_SIZE, 3), 'uint8'),
    )

  def reset(self, seed: int) -> simulator.Tree:
    self._time = 0
    np.random.seed(seed)  # LIBERO samples from the global generator.
    self._env.reset()
    obs = self._env.set_init_state(self._states[seed % len(self._states)])
    if self._images and self._fast_rendering:
      _leave_out_shadows(self._env.sim._render_context_offscreen.scn)
    for _ in range(SETTLE_STEPS):
      obs, *_ = self._env.step(HOLD)
    return self._obs(obs)

  def step(self, action_A: np.ndarray) -> simulator.Step:
    obs, reward, _, _ = self._env.step(action_A)
    self._time += 1
    success = bool(self._env.check_success())
    truncated = self._time >= self.spec.horizon
    return simulator.Step(self._obs(obs), reward, success, truncated, success)

  def render(self) -> np.ndarray:
    import mujoco

    model, data = self._env.sim.model._model, self._env.sim.data._data
    if self._renderer is None:
      try:
        self._renderer = mujoco.Renderer(model, VIDEO_SIZE, VIDEO_SIZE)
      except Exception as error:  # noqa: BLE001 EGL or OSMesa is missing.
        raise simulator.UnavailableError(
          f'MuJoCo cannot render here ({error}): install libegl1 and Mesa, and '
          'leave MUJOCO_GL unset, or libosmesa6 and set MUJOCO_GL=osmesa'
        ) from None
    options = mujoco.MjvOption()
    options.geomgroup[0] = 0  # Hides collision shapes.
    self._renderer.update_scene(data, _viewpoint(model, data), options)
    if self._fast_rendering:
      _leave_out_shadows(self._renderer.scene)
    return self._renderer.render()

  def close(self):
    if self._renderer is not None:
      self._renderer.close()
    self._env.close()

  def _obs(self, obs: Mapping[str, np.ndarray]) -> simulator.Tree:
    if not self._images:
      return np.concatenate([obs[ARM], obs[OBJECTS]]).astype(np.float32)
    return {
      'state': obs[ARM].astype(np.float32),
      'image': {  # LIBERO returns them upside down.
        name: obs[f'{camera}_image'][::-1] for name, camera in CAMERAS.items()
      },
      'instruction': self._text,
    }


def _leave_out_shadows(scene):
  """Turns shadows and reflections off."""
  import mujoco

  for flag in (
    mujoco.mjtRndFlag.mjRND_SHADOW,
    mujoco.mjtRndFlag.mjRND_REFLECTION,
  ):
    scene.flags[flag] = 0


def _viewpoint(model, data):
  """A camera for people: the front camera's view from further above."""
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


def _obs_arrays(obs) -> simulator.Tree:
  by_path = simulator.leaves(obs)
  return simulator.tree(
    {
      path: simulator.Array(x.shape, x.dtype.name)
      for path, x in by_path.items()
    }
  )


def _installed(suite: str) -> list[str]:
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
