"""A pool of simulators as a Env, for workflows to act in."""

import functools

import jax
import numpy as np

from rlinf_jax.envs import episode_log, simulator
from rlinf_jax.envs import pool as pool_lib
from stages import base

OURS = ('chunk', 'discount', 'step_timeout', 'idle_timeout', 'say')


def env(make, num_envs: int, num_processes: int = 1, **settings) -> base.Env:
  """An Env of `num_envs` simulators that run in processes of their own.

  Args:
    make: `index, **settings -> Environment`, as a pool wants it.
    num_envs: how many environments.
    num_processes: to spread them over.
    **settings: those of `Pool` by their names there, all others of `make`.
  """
  return from_pool(make_pool(make, num_envs, num_processes, **settings))


def make_pool(
  make, num_envs: int, num_processes: int = 1, **settings
) -> pool_lib.Pool:
  """The same as a `Pool`."""
  ours = {name: settings.pop(name) for name in OURS if name in settings}
  return pool_lib.Pool(
    functools.partial(make, **settings), num_envs, num_processes, **ours
  )


def from_pool(pool: pool_lib.Pool) -> base.Env:
  """A pool as a Env, which keeps it."""
  picture = pool.spec.picture
  return host_env(
    *(pool.spec, pool.init, pool.step),
    recorder=picture
    and base.VideoRecorder(pool.init, pool.frames, picture.shape),
    send=pool.send,
    snapshot_spec=_past(pool),
    save=pool.save,
    load=pool.load,
  )


def host_env(spec: simulator.Spec, init, step, **fields) -> base.Env:
  """A World of what is not JAX; `fields` are more of it."""
  low, high = tuple(spec.low.tolist()), tuple(spec.high.tolist())
  return base.Env(
    *(init, step, _shapes(spec), low, high, spec.horizon), host=True, **fields
  )


def _shapes(spec: simulator.Spec):
  """What one environment shows, as JAX has it."""
  return jax.tree.map(
    lambda like: jax.ShapeDtypeStruct(like.shape, like.dtype),
    spec.obs,
    is_leaf=lambda x: isinstance(x, simulator.Array),
  )


def _past(pool: pool_lib.Pool) -> episode_log.Past:
  """Shapes of what one environment is saved by."""
  one = jax.ShapeDtypeStruct((), np.int32)
  action = jax.ShapeDtypeStruct(pool.episode, np.float32)
  return episode_log.Past(one, one, action, _shapes(pool.spec))
