"""Demonstrations made on the spot, by a controller that somebody wrote."""

from collections.abc import Callable
import pathlib

from stages import base
from stages.envs import demonstrations


def record(
  workdir: str,
  *,
  env: Callable[[], base.Env],
  controller: Callable,
  num_envs: int,
  num_episodes: int,
  noise_std: float = 0.0,
) -> str:
  """The file of demonstrations of a run, made if it is not there.

  Args:
    workdir: the run folder.
    env: makes where; a simulator that is not needed is not started.
    controller: `obs_O -> action_A`, where −1 … 1 is the range of the world.
    num_envs: environments.
    num_episodes: how often to try; those that succeed are kept.
    noise_std: of actions from what the controller says.
  """
  path = pathlib.Path(workdir) / 'warm_start' / 'demonstrations.npz'
  if path.exists():
    return str(path)
  made, succeeded = demonstrations.collect(
    env(),
    controller,
    num_envs=num_envs,
    noise_std=noise_std,
    num_episodes=num_episodes,
  )
  print(
    f'Demonstrated: {succeeded} of {num_episodes} attempts succeeded, '
    f'{len(made.obs)} steps.',
    flush=True,
  )
  if not succeeded:
    raise ValueError(
      f'None of {num_episodes} demonstrations succeeded, so there is nothing '
      'to imitate: give a controller that can do the task, or a smaller '
      '`noise_std`.'
    )
  demonstrations.write(path, made)
  return str(path)
