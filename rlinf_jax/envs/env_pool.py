"""A pool of simulators as an `Env`, for workflows to act in."""

import functools

import jax
import numpy as np

from rlinf_jax.envs import simulator
from rlinf_jax.envs.processes import episode_log, pool
from stages.envs import env as env_lib
from stages.envs.rollouts import video

# Settings of the pool; all others are the simulator's.
POOL_SETTINGS = ('chunk', 'discount', 'step_timeout', 'idle_timeout', 'say')


def env(
  make: simulator.Make, num_envs: int, num_processes: int = 1, **settings
) -> env_lib.Env:
  """An Env of `num_envs` simulators that run in processes of their own.

  Args:
    make: `index, **settings -> Environment`: builds environment `index`. It is
      called in worker processes.
    num_envs: how many environments.
    num_processes: to spread them over.
    **settings: those of `EnvPool` by their names there; all others are passed
      to `make`.
  """
  return from_pool(make_pool(make, num_envs, num_processes, **settings))


def make_pool(
  make: simulator.Make, num_envs: int, num_processes: int = 1, **settings
) -> pool.EnvPool:
  """The pool of `env`, with the same arguments."""
  pool_settings = {
    name: settings.pop(name) for name in POOL_SETTINGS if name in settings
  }
  make = functools.partial(make, **settings)
  return pool.EnvPool(make, num_envs, num_processes, **pool_settings)


def from_pool(env_pool: pool.EnvPool) -> env_lib.Env:
  """A pool as an Env, which keeps it alive."""
  image = env_pool.spec.image
  recorder = image and video.VideoRecorder(
    env_pool.init, env_pool.frames, image.shape
  )
  return host_env(
    env_pool.spec,
    env_pool.init,
    env_pool.step,
    horizon=env_pool.horizon,
    recorder=recorder,
    send=env_pool.send,
    snapshot_spec=_snapshot_spec(env_pool),
    save=env_pool.save,
    load=env_pool.load,
  )


def host_env(
  spec: simulator.Spec, init, step, *, horizon: int | None = None, **fields
) -> env_lib.Env:
  """An Env of NumPy functions.

  Args:
    spec: of one environment.
    init: as `Env.init`.
    step: as `Env.step`.
    horizon: maximum steps of an episode; None for that of `spec`.
    **fields: further fields of the Env.
  """
  return env_lib.Env(
    init,
    step,
    _obs_spec(spec),
    tuple(spec.low.tolist()),
    tuple(spec.high.tolist()),
    horizon or spec.horizon,
    spec.choices,
    host=True,
    **fields,
  )


def _obs_spec(spec: simulator.Spec):
  """One environment's observation as JAX shapes."""
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype),
    spec.obs,
    is_leaf=lambda x: isinstance(x, simulator.Array),
  )


def _snapshot_spec(env_pool: pool.EnvPool) -> episode_log.Snapshot:
  """Shapes of one environment's snapshot."""
  scalar = jax.ShapeDtypeStruct((), np.int32)
  action = jax.ShapeDtypeStruct(env_pool.episode_shape, np.float32)
  return episode_log.Snapshot(scalar, scalar, action, _obs_spec(env_pool.spec))
