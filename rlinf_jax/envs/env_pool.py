"""A pool of simulators as a Env, for workflows to act in."""

import functools

import jax
import numpy as np

from rlinf_jax.envs import episode_log, simulator
from rlinf_jax.envs import pool as pool_lib
from stages import base

OURS = ('chunk', 'discount', 'patience', 'rest', 'say')


def world(make, n: int, processes: int = 1, **settings) -> base.Env:
  """A World of `n` environments that `make` makes, in processes of their own.

  Args:
    make: `index, **settings -> Environment`, as a pool wants it.
    n: how many environments.
    processes: to spread them over.
    **settings: those of `Pool` by their names there, all others of `make`.
  """
  return of(pool(make, n, processes, **settings))


def pool(make, n: int, processes: int = 1, **settings) -> pool_lib.Pool:
  """The same as a `Pool`."""
  ours = {name: settings.pop(name) for name in OURS if name in settings}
  return pool_lib.Pool(
    functools.partial(make, **settings), n, processes, **ours
  )


def of(pool: pool_lib.Pool) -> base.Env:
  """A pool as a Env, which keeps it."""
  picture = pool.spec.picture
  return stepped(
    *(pool.spec, pool.init, pool.step),
    camera=picture and base.Camera(pool.init, pool.film, picture.shape),
    send=pool.send,
    past=_past(pool),
    save=pool.save,
    load=pool.load,
  )


def stepped(spec: simulator.Spec, init, step, **fields) -> base.Env:
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
