"""Demonstrations made on the spot, by a controller that somebody wrote."""

from collections.abc import Callable
import pathlib

from stages import base
from stages.envs import demonstrations


def demonstrated(
  workdir: str,
  *,
  world: Callable[[], base.Env],
  controller: Callable,
  rows: int,
  attempts: int,
  deviation: float = 0.0,
) -> str:
  """The file of demonstrations of a run, made if it is not there.

  Args:
    workdir: the run folder.
    world: makes where; a simulator that is not needed is not started.
    controller: `obs_O -> action_A`, where −1 … 1 is the range of the world.
    rows: environments.
    attempts: how often to try; those that succeed are kept.
    deviation: of actions from what the controller says.
  """
  path = pathlib.Path(workdir) / 'warm_start' / 'demonstrations.npz'
  if path.exists():
    return str(path)
  made, succeeded = demonstrations.make(
    world(), controller, rows=rows, deviation=deviation, attempts=attempts
  )
  print(
    f'Demonstrated: {succeeded} of {attempts} attempts succeeded, '
    f'{len(made.obs)} steps.',
    flush=True,
  )
  if not succeeded:
    raise ValueError(
      f'None of {attempts} demonstrations succeeded, so there is nothing to '
      'imitate: give a controller that can do the task, or a smaller '
      '`deviation`.'
    )
  demonstrations.write(path, made)
  return str(path)
