"""A policy acts in a world, step by step.

Where the world is JAX, all steps are one stage, compiled as one loop. Where it
is a simulator, they are calls of two stages in turn, so that a plan may have
one half of the environments simulated while the policy acts on the other. Both
compute the same.
"""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import stages
from stages import base, core
from stages.envs import obs_stats


class Saved(NamedTuple):
  """Environments of a simulator, between rollouts.

  Attributes:
    token: who they are.
    past: by which any process can bring them to where they are.
  """

  token: Any
  past: Any


def rollout(
  policy: base.Policy,
  world: base.Env,
  T: int,
  *,
  greedy: bool = False,
  keep_states: bool = False,
) -> Callable:
  """Returns `params, stats, state, obs, keys -> state, obs, x, timestep`.

  `x`, an Experience, and `timestep` (without what is seen next, which `x` has)
  are [B, T]; the state of the world is used up.

  Args:
    policy: who acts.
    world: where.
    T: steps.
    greedy: whether it does what is likeliest, rather than what it draws.
    keep_states: whether time steps keep `final_state`, for rendering.
  """

  def act(params, stats, obs, key_B):
    """One step: what is done, what the world is told, and keys for the next."""
    key_B2 = jax.vmap(jax.random.split)(key_B)
    x = policy.act(
      params, obs_stats.normalize(stats, obs), key_B2[:, 0], greedy=greedy
    )
    command = (
      policy.to_env_action(x.action) if policy.to_env_action else x.action
    )
    return x._replace(obs=obs), command, key_B2[:, 1]

  def fused(params, stats, state, obs, key_B):
    def one(carry, _):
      state, obs, key_B = carry
      x, command, key_B = act(params, stats, obs, key_B)
      state, timestep = world.step(state, command)
      kept = timestep._replace(obs=())
      if not keep_states:
        kept = kept._replace(final_state=None)
      return (state, timestep.obs, key_B), (x, kept)

    start = state, obs, key_B
    (state, obs, _), made = jax.lax.scan(one, start, length=T)
    x, timestep = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), made)
    return state, obs, x, timestep

  if not world.host:
    name = 'attempt' if greedy else 'rollout'
    return stages.Stage(fused, name, unbatched=(0, 1), consumes=(2,))

  decide = stages.Stage(act, 'act', unbatched=(0, 1))
  simulate = [step_stage(world, t == 0, t == T - 1) for t in range(T)]
  # Two stages, so that a place of simulators sends what is seen and no more.
  gather = stages.Stage(_gathered, 'gather')
  collect = stages.Stage(_gathered, 'collect')

  def alternate(params, stats, state, obs, key_B):
    xs, timesteps = [], []
    for t in range(T):
      x, command, key_B = decide(params, stats, obs, key_B)
      state, timestep = simulate[t](state, command)
      obs = timestep.obs
      xs.append(x)
      timesteps.append(timestep._replace(obs=()))
    return state, obs, gather(*xs), collect(*timesteps)

  return alternate


def _gathered(*made):
  """Steps one after the other, as one tree of [B, T]."""
  return jax.tree.map(lambda *xs: jnp.stack(xs, 1), *made)


def reset(world: base.Env) -> stages.Stage:
  """Begins episodes: a stage `seed_B -> state, obs`.

  A simulator begins with all of its environments, the first seed's first: a
  piece of a batch would begin with them again.
  """
  if not world.host:
    return stages.Stage(world.init, 'reset')
  start = functools.partial(_start, world)
  like = lambda seed: _begun(world, seed)
  return stages.Stage(start, 'reset', 'batch', host=True, out_shapes=like)


def step_stage(world: base.Env, first: bool, last: bool) -> stages.Stage:
  """One step of a simulator: a stage `state, command -> state, TimeStep`.

  Args:
    world: the simulator.
    first: of some steps, so that it is given what the last one has returned,
      which was in another process, it may be.
    last: of them.
  """
  saves = world.save is not None

  def like(state, command):
    del command
    token = state.token if saves and first else state
    B = token.shape[0]
    state = (
      Saved(token, _rows(world.snapshot_spec, B)) if saves and last else token
    )
    obs = _rows(world.obs_spec, B)
    row = jax.ShapeDtypeStruct((B,), jnp.float32)
    return state, base.TimeStep(obs, row, row, row, obs, row, row, row)

  def step(state, command):
    token = world.load(*state) if saves and first else state
    if world.send is None:
      return leave(world.step(token, command))
    return stages.Deferred(world.send(token, command), leave)

  def leave(made):
    token, timestep = made
    return (_saved(world, token) if last else token), timestep

  ahead = world.send is not None
  grain = 'batch' if world.lockstep else 'row'
  return stages.Stage(
    step,
    'simulate',
    grain,
    consumes=(0,),
    host=True,
    out_shapes=like,
    asynchronous=ahead,
  )


def init(world: base.Env, seed_B):
  """Begins episodes outside of a step."""
  if not world.host:
    return jax.jit(world.init)(seed_B)
  start = lambda seed_B: _start(world, np.asarray(seed_B))
  if isinstance(seed_B, jax.core.Tracer):  # Such as for shapes alone.
    return jax.pure_callback(start, _begun(world, seed_B), seed_B)
  return jax.tree.map(jnp.asarray, start(seed_B))


def _start(world: base.Env, seed_B):
  token, obs = world.init(seed_B)
  return _saved(world, token), obs


def _saved(world: base.Env, token):
  """What of environments outlives the process that has them."""
  return Saved(token, world.save(token)) if world.save else token


def _begun(world: base.Env, seed):
  B = seed.shape[0]
  token = jax.ShapeDtypeStruct((B, 3), jnp.int32)
  if world.save:
    token = Saved(token, _rows(world.snapshot_spec, B))
  return token, _rows(world.obs_spec, B)


def _rows(like, B: int):
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct((B, *x.shape), x.dtype), like
  )


def draw_seeds(n: int, group_size: int) -> stages.Stage:
  """Begins worlds: a stage `key -> seed_B`, `n` seeds, each `group_size` times.

  Rows of a group are next to each other.
  """

  def draw(key):
    key = jax.random.fold_in(key, core.BEGIN)
    most = jnp.iinfo(jnp.int32).max
    seed_N = jax.random.randint(key, (n,), 0, most, jnp.int32)
    return jnp.repeat(seed_N, group_size)

  return stages.Stage(draw, 'seeds', 'batch')
