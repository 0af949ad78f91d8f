"""ManiSkill 3 as an `Env`: its tasks by state or camera images, on CPUs.

PhysX on a CPU holds one scene per environment, so environments are spread over
several processes. Cameras render on a GPU, or on a CPU through a software
Vulkan device. For ManiSkill's vectorized simulation on a GPU see `vector`.
"""

from collections.abc import Callable, Mapping, Sequence
import functools
import math
from typing import Any

import numpy as np

from rlinf_jax.envs import settings as settings_lib
from rlinf_jax.envs import simulator

VIDEO_SIZE = 160  # Pixels along each edge of a frame for people.


@settings_lib.passes_settings_to(lambda: make)
def env(
  task: str,
  num_envs: simulator.PositiveInt,
  num_processes: simulator.PositiveInt = 1,
  *,
  instruction: str | None = None,
  instructions: Callable[[Sequence[str]], Any] | None = None,
  **settings,
):
  """An Env of `num_envs` environments of a task, in processes of their own.

  Args:
    task: such as 'PushCube-v1'.
    num_envs: how many environments.
    num_processes: to spread them over.
    instruction: what is to be done, in words, as ManiSkill does not say it.
    instructions: encodes texts as tokens, such as `instructions.pi05`.
      Observations with images then have those of `instruction` under 'prompt'.
    **settings: those of `rlinf_jax.envs.processes.pool.EnvPool` by
      their names there, all others of `make`.

  Raises:
    ValueError: if only one of `instruction` and `instructions` is given.
  """
  from rlinf_jax.envs import env_pool  # Not in a worker: it imports JAX.

  if (instruction is None) != (instructions is None):
    raise ValueError(
      f'{task!r} has the instruction {instruction!r} and the encoder '
      f'{instructions}: give both, or neither.'
    )
  if instructions is not None:
    prompt = instructions([instruction])
    settings['prompt'] = {
      name: np.asarray(x)[0] for name, x in prompt._asdict().items()
    }
  return env_pool.env(make, num_envs, num_processes, task=task, **settings)


def make(
  index: int,
  task: str,
  *,
  control_mode: str = 'pd_joint_delta_pos',
  reward_mode: str = 'normalized_dense',
  horizon: simulator.PositiveInt | None = None,
  images: bool = False,
  image_size: simulator.PositiveInt = 128,
  video: bool = False,
  prompt: Mapping[str, np.ndarray] | None = None,
  **settings,
) -> simulator.Environment:
  """Builds one environment; those of a task do not depend on the index.

  The observation is one vector, the full state. With `images` it is a dict:
  'image' by camera, 'state' of the robot alone, and 'prompt' if it is given.

  Args:
    index: of the environment.
    task: such as 'PushCube-v1'.
    control_mode: ManiSkill's name of how actions move the robot.
    reward_mode: 'normalized_dense', at most 1 a step, 'dense', or 'sparse'.
    horizon: steps after which an episode is truncated; None for the task's own.
    images: whether observations have images of the task's cameras.
    image_size: their edge, in pixels.
    video: whether evaluations are recorded, by a camera of the task that is
      not the robot's. Where nothing can render, there is no video.
    prompt: tokens of an instruction and their mask; None for none.
    **settings: further arguments of ManiSkill's environments.
  """
  del index
  registration = _installed(task)
  no_rendering = _no_rendering()
  if no_rendering and images:
    raise simulator.UnavailableError(
      f'{no_rendering}. Without one there are tasks by state.'
    )
  if task not in registration.REGISTERED_ENVS:
    raise simulator.UnavailableError(
      f'ManiSkill has no task {task!r}, but {_nearest(task, registration)}.'
    )
  horizon = horizon or registration.REGISTERED_ENVS[task].max_episode_steps
  if horizon is None:
    raise simulator.UnavailableError(
      f'Episodes of {task!r} have no limit of steps: give it a `horizon`.'
    )
  # Without a GPU, ManiSkill renders by a software Vulkan device.
  render = {'obs_mode': 'rgb' if images else 'state', 'render_backend': 'none'}
  if images or (video and not no_rendering):
    render |= {
      'render_backend': 'gpu',
      'sensor_configs': {'width': image_size, 'height': image_size},
      'human_render_camera_configs': {
        'width': VIDEO_SIZE,
        'height': VIDEO_SIZE,
      },
    }
  env = registration.make(
    task,
    num_envs=1,
    control_mode=control_mode,
    reward_mode=reward_mode,
    sim_backend='physx_cpu',
    **(render | settings),
  )
  return ManiSkill(env, horizon, video, prompt if images else None)


class ManiSkill:
  """A ManiSkill environment behind the `simulator.Environment` interface."""

  def __init__(
    self,
    env: Any,
    horizon: int,
    video: bool,
    prompt: Mapping[str, np.ndarray] | None = None,
  ):
    """Reads the spaces.

    Args:
      env: ManiSkill's.
      horizon: maximum steps of an episode.
      video: whether it is rendered for people.
      prompt: part of each observation, which is then a dict; None for none.
    """
    self._env, self._time = env, 0
    self._words = {'prompt': dict(prompt)} if prompt else {}
    space = env.single_action_space
    image = simulator.Array((VIDEO_SIZE, VIDEO_SIZE, 3), 'uint8')
    self.spec = simulator.Spec(
      obs=self._with_words(
        _obs_arrays(env.single_observation_space),
        lambda x: simulator.Array(x.shape, x.dtype.name),
      ),
      low=space.low,
      high=space.high,
      horizon=horizon,
      image=image if video else None,
    )

  def reset(self, seed: int) -> simulator.Tree:
    self._time = 0
    obs, _ = self._env.reset(seed=seed)
    return self._with_words(_obs(obs))

  def step(self, action_A: np.ndarray) -> simulator.Step:
    obs, reward, terminated, _, info = self._env.step(action_A)
    self._time += 1
    return simulator.Step(
      obs=self._with_words(_obs(obs)),
      reward=float(reward[0]),
      terminated=bool(terminated[0]),
      truncated=self._time >= self.spec.horizon,
      success=bool(info['success'][0]) if 'success' in info else False,
    )

  def render(self) -> np.ndarray:
    cameras = self._env.scene.human_render_cameras
    if _no_rendering() or not cameras:
      raise simulator.UnavailableError(
        _no_rendering() or 'the task has no camera for people'
      )
    return self._env.render_rgb_array(next(iter(cameras)))[0].numpy()

  def close(self):
    self._env.close()

  def _with_words(self, obs: simulator.Tree, of=lambda x: x) -> simulator.Tree:
    """An observation with the prompt, each array of which is `of` it."""
    words = {
      key: {name: of(x) for name, x in prompt.items()}
      for key, prompt in self._words.items()
    }
    return obs | words if words else obs


def _obs_arrays(space) -> simulator.Tree:
  """The observation space as a tree of `simulator.Array`."""
  if not isinstance(space, Mapping):
    return simulator.Array(space.shape, 'float32')
  robot, images = _parts(space)
  numbers = sum(math.prod(x.shape) for x in robot)
  return {
    'image': {
      camera: simulator.Array(x.shape, 'uint8') for camera, x in images.items()
    },
    'state': simulator.Array((numbers,), 'float32'),
  }


def _obs(obs) -> simulator.Tree:
  """The observation of the only environment of a batch, in NumPy."""
  if not isinstance(obs, Mapping):
    return obs[0].numpy()
  robot, images = _parts(obs)
  numbers = [x[0].numpy().ravel() for x in robot]
  return {
    'image': {camera: x[0].numpy() for camera, x in images.items()},
    'state': np.concatenate(numbers, dtype=np.float32),
  }


def _parts(tree: Mapping) -> tuple[list, dict[str, Any]]:
  """Arrays of the robot's state, and images by camera."""
  robot = {k: x for k, x in tree.items() if k in ('agent', 'extra')}
  images = {name: x['rgb'] for name, x in tree['sensor_data'].items()}
  return [*simulator.leaves(robot).values()], images


def _installed(task: str):
  """ManiSkill's registry of tasks.

  Raises:
    UnavailableError: if ManiSkill is missing.
  """
  try:
    import mani_skill.envs  # noqa: F401 It registers tasks.
    from mani_skill.utils import download_asset, registration
  except ImportError as error:
    raise simulator.UnavailableError(
      f'{task!r} needs ManiSkill ({error}): pip install '
      '"rlinf-jax[maniskill]", after a torch of your choice.'
    ) from None

  # ManiSkill would ask whether to download missing assets, or download them
  # without asking. A failed download leaves an empty folder, which counts as
  # downloaded from then on. So downloads raise instead.
  def refuse(source, *args, **kwargs):
    raise simulator.UnavailableError(
      f'{task!r} needs assets that come apart from ManiSkill: '
      f'{source.output_dir / source.target_path} is not there. `python -m '
      f'mani_skill.utils.download_asset {task}` downloads them from '
      f'{source.hf_repo_id or source.url}; MS_ASSET_DIR says where they lie.'
    )

  download_asset.prompt_yes_no = lambda message: True
  download_asset.download = refuse
  return registration


@functools.cache
def _no_rendering() -> str:
  """Why nothing can be rendered here; '' if it can."""
  import sapien

  try:
    sapien.render.RenderMaterial()
  except RuntimeError as error:
    # Tasks by state create materials, too.
    sapien.render.RenderMaterial = NullMaterial
    sapien.pysapien.render.RenderMaterial = NullMaterial
    return (
      f"ManiSkill's images need a Vulkan device ({error}): install the "
      "driver of a GPU, or Mesa 25's for processors (`mesa-vulkan-drivers`; "
      'VK_ICD_FILENAMES says where its `lvp_icd` is, if it is not found)'
    )
  return ''


class NullMaterial:
  """Replaces a surface material where nothing is rendered."""

  def __init__(self, *args, **kwargs):
    """Takes any arguments."""

  def __setattr__(self, name, value):
    """Ignores the value."""

  def __getattr__(self, name):
    return lambda *args, **kwargs: None


def _nearest(task: str, registration) -> str:
  """Names of tasks that resemble a name."""
  import difflib

  near = difflib.get_close_matches(task, registration.REGISTERED_ENVS, 3, 0.3)
  return ', '.join(near)
