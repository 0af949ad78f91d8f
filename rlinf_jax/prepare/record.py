"""Demonstrations recorded on the spot, by a scripted controller."""

from collections.abc import Callable
import pathlib

from stages import ranges
from stages.envs import demonstrations as demonstrations_lib
from stages.envs import env as env_lib


def demonstrations(
  workdir: str,
  *,
  env: Callable[[], env_lib.Env],
  controller: demonstrations_lib.Controller,
  num_envs: ranges.PositiveInt,
  num_episodes: ranges.PositiveInt,
  noise_std: ranges.NonNegativeFloat = 0.0,
  chunk: ranges.PositiveInt = 1,
  controller_env: Callable[[], env_lib.Env] | None = None,
) -> str:
  """The path of a run's demonstrations, recorded if they do not exist.

  Args:
    workdir: the run folder.
    env: makes the environment; not called if the demonstrations exist.
    controller: `obs_O -> action_A`, where −1 … 1 is the action range.
    num_envs: episodes that run in parallel.
    num_episodes: episodes to try; those that succeed are kept.
    noise_std: standard deviation of the noise added to actions.
    chunk: actions of a row, see `stages.envs.demonstrations`.
    controller_env: makes the environment in which the controller acts, if the
      observations of `env` are not vectors; see `stages.envs.demonstrations`.

  Raises:
    ValueError: if no episode succeeds.
  """
  path = pathlib.Path(workdir) / 'warm_start' / 'demonstrations.npz'
  if path.exists():
    return str(path)
  data, succeeded = demonstrations_lib.collect(
    env(),
    controller,
    num_envs=num_envs,
    noise_std=noise_std,
    num_episodes=num_episodes,
    chunk=chunk,
    controller_env=controller_env and controller_env(),
  )
  print(
    f'Demonstrations: {succeeded} of {num_episodes} episodes succeeded, '
    f'{len(data.action)} steps.',
    flush=True,
  )
  if not succeeded:
    raise ValueError(
      f'None of {num_episodes} demonstrations succeeded, so there is nothing '
      'to imitate: give a controller that can do the task, or a smaller '
      '`noise_std`.'
    )
  demonstrations_lib.write(path, data)
  return str(path)
