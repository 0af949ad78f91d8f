"""ManiSkill 3 as a Env: its tasks by state or by picture, on processors.

PhysX on a processor holds one scene an environment, so many environments are
many objects in several processes. Cameras draw on a graphics device, or on a
processor that stands in for one. Vectorized simulation on a GPU is not here.
"""

from collections.abc import Mapping
import functools
import math
from typing import Any

import numpy as np

from rlinf_jax.envs import simulator

VIDEO = 160  # Pixels along each edge of a picture for people.


def env(task: str, num_envs: int, num_processes: int = 1, **settings):
  """An Env of `num_envs` environments of a task, in processes of their own.

  Args:
    task: such as 'PushCube-v1'.
    num_envs: how many environments.
    num_processes: to spread them over.
    **settings: those of `rlinf_jax.envs.pool.Pool` by their names there, all
      others of `make`.
  """
  from rlinf_jax.envs import env_pool  # Not in a worker: it imports JAX.

  return env_pool.env(make, num_envs, num_processes, task=task, **settings)


def make(
  index: int,
  task: str,
  *,
  control_mode: str = 'pd_joint_delta_pos',
  reward_mode: str = 'normalized_dense',
  horizon: int | None = None,
  images: bool = False,
  image_size: int = 128,
  video: bool = False,
  **settings,
) -> simulator.Environment:
  """One environment; all of a task are alike, whatever the index.

  Without pictures what is seen is one vector, of all there is to know. With
  pictures it is a dict: 'image' by camera, and 'state' of the robot alone.

  Args:
    index: of the environment.
    task: such as 'PushCube-v1'.
    control_mode: how actions move the robot.
    reward_mode: 'normalized_dense', at most 1 a step, 'dense', or 'sparse'.
    horizon: steps after which an episode is truncated; None for the task's own.
    images: show what the task's cameras see.
    image_size: of pictures, in pixels.
    video: let people see it too, by a camera of the task that is none of the
      robot's: evaluations have videos then. Where nothing can draw, there is
      none, and all else goes on.
    **settings: more of what ManiSkill's environments can be told.
  """
  del index
  registration = _installed(task)
  blind = _blind()
  if blind and images:
    raise simulator.UnavailableError(
      f'{blind}. Without one there are tasks by state.'
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
  # Where there is no GPU, ManiSkill takes what draws on a processor.
  shown = {'obs_mode': 'rgb' if images else 'state', 'render_backend': 'none'}
  if images or (video and not blind):
    shown |= {
      'render_backend': 'gpu',
      'sensor_configs': {'width': image_size, 'height': image_size},
      'human_render_camera_configs': {'width': VIDEO, 'height': VIDEO},
    }
  env = registration.make(
    task,
    num_envs=1,
    control_mode=control_mode,
    reward_mode=reward_mode,
    sim_backend='physx_cpu',
    **(shown | settings),
  )
  return ManiSkill(env, horizon, video)


class ManiSkill:
  """An environment of ManiSkill, as a worker steps it."""

  def __init__(self, env: Any, horizon: int, video: bool):
    """Reads the spaces.

    Args:
      env: ManiSkill's.
      horizon: most steps of an episode.
      video: whether it is drawn for people.
    """
    self._env, self._time = env, 0
    space = env.single_action_space
    picture = simulator.Array((VIDEO, VIDEO, 3), 'uint8') if video else None
    self.spec = simulator.Spec(
      *(_like(env.single_observation_space), space.low, space.high),
      *(horizon, picture),
    )

  def reset(self, seed: int) -> simulator.Tree:
    self._time = 0
    obs, _ = self._env.reset(seed=seed)
    return _seen(obs)

  def step(self, action_A: np.ndarray) -> simulator.Step:
    obs, reward, terminated, _, info = self._env.step(action_A)
    self._time += 1
    return simulator.Step(
      obs=_seen(obs),
      reward=float(reward[0]),
      terminated=bool(terminated[0]),
      truncated=self._time >= self.spec.horizon,
      success=bool(info['success'][0]) if 'success' in info else False,
    )

  def draw(self) -> np.ndarray:
    cameras = self._env.scene.human_render_cameras
    if _blind() or not cameras:
      raise simulator.UnavailableError(
        _blind() or 'the task has no camera for people'
      )
    return self._env.render_rgb_array(next(iter(cameras)))[0].numpy()

  def close(self):
    self._env.close()


def _like(space) -> simulator.Tree:
  """What is seen, as shapes."""
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


def _seen(obs) -> simulator.Tree:
  """What is seen, of the one environment of a batch."""
  if not isinstance(obs, Mapping):
    return obs[0].numpy()
  robot, images = _parts(obs)
  numbers = [x[0].numpy().ravel() for x in robot]
  return {
    'image': {camera: x[0].numpy() for camera, x in images.items()},
    'state': np.concatenate(numbers, dtype=np.float32),
  }


def _parts(tree: Mapping) -> tuple[list, dict[str, Any]]:
  """What the robot feels, and what each camera sees."""
  robot = {k: x for k, x in tree.items() if k in ('agent', 'extra')}
  images = {name: x['rgb'] for name, x in tree['sensor_data'].items()}
  return [*simulator.leaves(robot).values()], images


def _installed(task: str):
  """ManiSkill's registry."""
  try:
    import mani_skill.envs  # noqa: F401 It registers tasks.
    from mani_skill.utils import download_asset, registration
  except ImportError as error:
    raise simulator.UnavailableError(
      f'{task!r} needs ManiSkill ({error}): pip install '
      '"rlinf-jax[maniskill]", after a torch of your choice.'
    ) from None

  # It would ask whether to download what is missing. Told not to ask, it takes
  # that for a yes; and a download that fails leaves an empty folder behind,
  # which counts as downloaded ever after.
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
def _blind() -> str:
  """Why nothing can be drawn here, if nothing can."""
  import sapien

  try:
    sapien.render.RenderMaterial()
  except RuntimeError as error:
    # Even tasks that draw nothing make some.
    sapien.render.RenderMaterial = Inert
    sapien.pysapien.render.RenderMaterial = Inert
    return (
      f"ManiSkill's pictures need a Vulkan device ({error}): install the "
      "driver of a GPU, or Mesa 25's for processors (`mesa-vulkan-drivers`; "
      'VK_ICD_FILENAMES says where its `lvp_icd` is, if it is not found)'
    )
  return ''


class Inert:
  """Stands for a material of surfaces that nobody draws."""

  def __init__(self, *args, **kwargs):
    """Takes whatever a material takes."""

  def __setattr__(self, name, value):
    """Keeps nothing."""

  def __getattr__(self, name):
    return lambda *args, **kwargs: None


def _nearest(task: str, registration) -> str:
  """Tasks that are called alike."""
  import difflib

  near = difflib.get_close_matches(task, registration.REGISTERED_ENVS, 3, 0.3)
  return ', '.join(near)
