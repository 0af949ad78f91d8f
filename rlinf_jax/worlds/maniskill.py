"""ManiSkill 3 as a World: its tasks by state, simulated on processors.

PhysX on a processor holds one scene an environment, so many environments are
many objects in several processes. Its vectorised simulation on a GPU and its
cameras are not here.
"""

from typing import Any

import numpy as np

from rlinf_jax.worlds import environment


def world(task: str, n: int, processes: int = 1, **settings):
  """A World of `n` environments of a task, in processes of their own.

  Args:
    task: such as 'PushCube-v1'.
    n: how many environments.
    processes: to spread them over.
    **settings: those of `rlinf_jax.worlds.pool.Pool` by their names there, all
      others of `make`.
  """
  from rlinf_jax.worlds import hosted  # Not in a worker: it imports JAX.

  return hosted.world(make, n, processes, task=task, **settings)


def make(
  index: int,
  task: str,
  *,
  control: str = 'pd_joint_delta_pos',
  reward: str = 'normalized_dense',
  horizon: int | None = None,
  **settings,
) -> environment.Environment:
  """One environment; all of a task are alike, whatever the index.

  Args:
    index: of the environment.
    task: such as 'PushCube-v1'.
    control: how actions move the robot.
    reward: 'normalized_dense', at most 1 a step, 'dense', or 'sparse'.
    horizon: steps after which an episode is truncated; None for the task's own.
    **settings: more of what ManiSkill's environments can be told.
  """
  del index
  registration = _installed(task)
  if task not in registration.REGISTERED_ENVS:
    raise environment.UnavailableError(
      f'ManiSkill has no task {task!r}, but {_nearest(task, registration)}.'
    )
  horizon = horizon or registration.REGISTERED_ENVS[task].max_episode_steps
  if horizon is None:
    raise environment.UnavailableError(
      f'Episodes of {task!r} have no limit of steps: give it a `horizon`.'
    )
  env = registration.make(
    task,
    num_envs=1,
    obs_mode='state',
    control_mode=control,
    reward_mode=reward,
    sim_backend='physx_cpu',
    render_backend='none',
    **settings,
  )
  return ManiSkill(env, horizon)


class ManiSkill:
  """An environment of ManiSkill, as a worker steps it."""

  def __init__(self, env: Any, horizon: int):
    """Reads the spaces."""
    self._env, self._time = env, 0
    shape = env.single_observation_space.shape
    space = env.single_action_space
    self.spec = environment.Spec(
      environment.Array(shape, 'float32'), space.low, space.high, horizon
    )

  def reset(self, seed: int) -> np.ndarray:
    self._time = 0
    obs, _ = self._env.reset(seed=seed)
    return obs[0].numpy()

  def step(self, action_A: np.ndarray) -> environment.Step:
    obs, reward, terminated, _, info = self._env.step(action_A)
    self._time += 1
    return environment.Step(
      obs=obs[0].numpy(),
      reward=float(reward[0]),
      terminated=bool(terminated[0]),
      truncated=self._time >= self.spec.horizon,
      success=bool(info['success'][0]) if 'success' in info else False,
    )

  def close(self):
    self._env.close()


def _installed(task: str):
  """ManiSkill's registry, on a machine with or without a graphics device."""
  try:
    import mani_skill.envs  # noqa: F401 It registers tasks.
    from mani_skill.utils import download_asset, registration
    import sapien
  except ImportError as error:
    raise environment.UnavailableError(
      f'{task!r} needs ManiSkill ({error}): pip install '
      '"rlinf-jax[maniskill]", after a torch of your choice.'
    ) from None
  try:
    sapien.render.RenderMaterial()
  except RuntimeError:  # No device: even tasks that draw nothing make some.
    sapien.render.RenderMaterial = Inert
    sapien.pysapien.render.RenderMaterial = Inert

  # It would ask whether to download what is missing. Told not to ask, it takes
  # that for a yes; and a download that fails leaves an empty folder behind,
  # which counts as downloaded ever after.
  def refuse(source, *args, **kwargs):
    raise environment.UnavailableError(
      f'{task!r} needs assets that come apart from ManiSkill: '
      f'{source.output_dir / source.target_path} is not there. `python -m '
      f'mani_skill.utils.download_asset {task}` downloads them from '
      f'{source.hf_repo_id or source.url}; MS_ASSET_DIR says where they lie.'
    )

  download_asset.prompt_yes_no = lambda message: True
  download_asset.download = refuse
  return registration


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
