"""Meta-World's own scripted policies, to record demonstrations with."""

from collections.abc import Sequence
import warnings

import jax
import jax.numpy as jnp
import numpy as np

from rlinf_jax.envs import metaworld, task_turns
from stages import ranges
from stages.envs import demonstrations


def published(
  tasks: Sequence[str], *, group_size: ranges.PositiveInt = 1
) -> demonstrations.Controller:
  """A controller `obs_O -> action_A` that follows the policy of each task.

  The policies are Python, one for each task, and read the state of things. So
  the controller is called on the host with the observations of a whole batch of
  environments, in whose order it finds the task of each.

  Args:
    tasks: those that environments have in turn, as given to `metaworld.env`.
    group_size: likewise.

  Raises:
    UnavailableError: if Meta-World is missing, or has no such task.
    ValueError: when called with observations other than states.
  """
  metaworld.check_tasks(tasks)
  from metaworld.policies import ENV_POLICY_MAP

  # Their actions may exceed the range, and are clipped here.
  warnings.filterwarnings('ignore', r'Constant\(s\) may be too high')
  policies = [ENV_POLICY_MAP[task]() for task in tasks]
  turns = task_turns.Turns(len(tasks), group_size)

  def act(obs) -> np.ndarray:
    obs_BO = np.asarray(obs, np.float64).reshape(-1, metaworld.STATE)
    task_B = turns.task(np.arange(len(obs_BO)))
    rows = zip(task_B, obs_BO, strict=True)
    action_BA = np.array([policies[n].get_action(obs_O) for n, obs_O in rows])
    action_BA = np.clip(action_BA, -1.0, 1.0).astype(np.float32)
    return action_BA.reshape(*obs.shape[:-1], metaworld.ACTION)

  def controller(obs_O):
    if obs_O.shape != (metaworld.STATE,):
      raise ValueError(
        f"Meta-World's policies read {metaworld.STATE} numbers, and "
        f'observations have the shape {obs_O.shape}: give as `controller_env` '
        'the same environment without pictures (image_size = None).'
      )
    action_A = jax.ShapeDtypeStruct((metaworld.ACTION,), jnp.float32)
    return jax.pure_callback(act, action_A, obs_O, vmap_method='broadcast_all')

  return controller
