"""Meta-World as an `Env`: fifty tasks of one arm, from states.

env = metaworld.env('reach-v3', num_envs=16, num_processes=2)

A task has fifty scenes, which differ in where things and the goal are. The
episode of a seed is in the scene of that number, modulo fifty.
"""

import difflib

from rlinf_jax.envs import gymnasium, simulator
from rlinf_jax.envs import settings as settings_lib

SCENES_SEED = 0  # Of the fifty scenes, the same ones in all environments.
NEEDED = '{!r} needs Meta-World ({}): pip install "rlinf-jax[metaworld]".'


@settings_lib.passes_settings_to(lambda: make)
def env(
  task: str,
  num_envs: simulator.PositiveInt,
  num_processes: simulator.PositiveInt = 1,
  **settings,
):
  """An Env of `num_envs` environments of a task, in processes of their own.

  Args:
    task: such as 'reach-v3'.
    num_envs: how many environments.
    num_processes: to spread them over.
    **settings: those of `rlinf_jax.envs.processes.pool.EnvPool` by
      their names there, all others of `make`.
  """
  from rlinf_jax.envs import env_pool  # Not in a worker: it imports JAX.

  return env_pool.env(make, num_envs, num_processes, task=task, **settings)


def make(
  index: int,
  task: str,
  *,
  horizon: simulator.PositiveInt = 500,
  terminate: bool = False,
  video: bool = False,
) -> simulator.Environment:
  """Builds one environment; those of a task do not depend on the index.

  The observation is the published one, [39]: hand, gripper and things, now and
  a step before, and the goal. The reward is Meta-World's, at most 10 a step.

  Args:
    index: of the environment.
    task: such as 'reach-v3'.
    horizon: steps after which an episode is truncated; 500 as published.
    terminate: whether success ends an episode.
    video: whether evaluations are recorded, which needs EGL or OSMesa.

  Raises:
    UnavailableError: if Meta-World is missing, or has no such task.
  """
  del index
  try:
    import gymnasium as gym
    import metaworld
  except ImportError as error:
    raise simulator.UnavailableError(NEEDED.format(task, error)) from None
  if task not in metaworld.ALL_V3_ENVIRONMENTS:
    names = metaworld.ALL_V3_ENVIRONMENTS
    near = difflib.get_close_matches(task, names, 3, 0.3) or names
    raise simulator.UnavailableError(
      f'Meta-World has no task {task!r}, but {", ".join(near)}.'
    )
  made = gym.make(
    'Meta-World/MT1',
    env_name=task,
    seed=SCENES_SEED,
    max_episode_steps=horizon,
    terminate_on_success=terminate,
    render_mode='rgb_array' if video else None,
    disable_env_checker=True,  # It warns of bounds that are equal.
  )
  # Its own resets draw a scene that does not follow from their seed.
  made.get_wrapper_attr('toggle_sample_tasks_on_reset')(False)
  scenes = made.get_wrapper_attr('tasks')
  return gymnasium.Gymnasium(
    made,
    lambda seed: made.unwrapped.set_task(scenes[seed % len(scenes)]),
  )
