"""Rollouts: a policy acts in a batch of environments, step by step.

In a JAX environment all steps are one stage, compiled as one loop. In a
simulator they alternate between two stages, so that a plan may simulate one
half of the environments while the policy acts on the other. Both compute the
same.
"""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import stages
from stages import base, core
from stages.envs import env as env_lib
from stages.envs.rollouts import obs_stats


class Saved(NamedTuple):
  """State of a simulator's environments between rollouts.

  Attributes:
    token: identifies the environments.
    snapshot: data from which any process can restore them.
  """

  token: Any
  snapshot: Any


def rollout(
  policy: base.Policy,
  env: env_lib.Env,
  num_steps: int,
  *,
  greedy: bool = False,
  keep_states: bool = False,
  keep_final_obs: bool = True,
) -> Callable:
  """Returns `params, obs_stats, state, obs, keys -> state, obs, x, timestep`.

  `x`, an Experience, and `timestep` (without `obs`, which `x` has) are [B, T].
  The environment's state is consumed.

  Args:
    policy: the acting policy.
    env: the environment.
    num_steps: T.
    greedy: whether to take the likeliest action instead of sampling.
    keep_states: whether time steps keep `final_state`, for rendering.
    keep_final_obs: whether they keep `final_obs`, which a critic reads; `()`
      otherwise. Pictures of them then need not be drawn, sent or stored.
  """
  without = {'obs': ()} | ({} if keep_final_obs else {'final_obs': ()})

  def act(params, stats, obs, key_B):
    """One step: experience, the environment's action, keys for the next."""
    key_B2 = jax.vmap(jax.random.split)(key_B)
    x = policy.act(
      params, obs_stats.normalize(stats, obs), key_B2[:, 0], greedy=greedy
    )
    to_env_action = policy.to_env_action
    env_action = to_env_action(x.action) if to_env_action else x.action
    return x._replace(obs=obs), env_action, key_B2[:, 1]

  if not env.host:
    name = 'attempt' if greedy else 'rollout'
    dropped = without | ({} if keep_states else {'final_state': None})
    prepare = policy.prepare_act or (lambda params: params)
    scan = functools.partial(_scan, prepare, act, env, num_steps, dropped)
    return stages.Stage(
      scan, name, unbatched=(0, 1), consumes=(2,), rounds=policy.rounds
    )

  act_stage = stages.Stage(act, 'act', unbatched=(0, 1), rounds=policy.rounds)
  simulate = [
    step_stage(env, t == 0, t == num_steps - 1) for t in range(num_steps)
  ]
  # Two stages, so that a place of simulators sends observations and no more.
  gather = stages.Stage(_stack, 'gather')
  collect = stages.Stage(_stack, 'collect')

  def alternate(params, stats, state, obs, key_B):
    xs, timesteps = [], []
    for t in range(num_steps):
      x, env_action, key_B = act_stage(params, stats, obs, key_B)
      state, timestep = simulate[t](state, env_action)
      obs = timestep.obs
      xs.append(x)
      timesteps.append(timestep._replace(**without))
    return state, obs, gather(*xs), collect(*timesteps)

  return alternate


def _scan(
  prepare: Callable,
  act: Callable,
  env: env_lib.Env,
  num_steps: int,
  dropped: dict[str, Any],
  params,
  stats,
  state,
  obs,
  key_B,
):
  """All steps in a JAX environment, as one loop; see `rollout`.

  `prepare` is `base.Policy.prepare_act`. `dropped` names fields of time steps
  that are not kept, with their values.
  """
  # XLA leaves in a loop what has larger results than arguments.
  params = prepare(params)

  def step(carry, _):
    state, obs, key_B = carry
    x, env_action, key_B = act(params, stats, obs, key_B)
    state, timestep = env.step(state, env_action)
    kept = timestep._replace(**dropped)
    return (state, timestep.obs, key_B), (x, kept)

  start = state, obs, key_B
  (state, obs, _), steps = jax.lax.scan(step, start, length=num_steps)
  x, timestep = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), steps)
  return state, obs, x, timestep


def _stack(*steps):
  """Stacks steps to one tree of [B, T]."""
  return jax.tree.map(lambda *xs: jnp.stack(xs, 1), *steps)


def reset(env: env_lib.Env, *, with_task: bool = False) -> stages.Stage:
  """Starts episodes: a stage `seed_B -> state, obs`.

  A simulator resets its environments from the first on, so its batch cannot be
  cut: a second piece would reset the same ones again.

  Args:
    env: the environment.
    with_task: whether the stage also returns the number of each row's task, as
      only one stage may read the state of a simulator.
  """

  def start(seed_B):
    state, obs = env.init(seed_B)
    task = (env.task(state),) if with_task else ()
    return _saved(env, state), obs, *task

  def shapes(seed):
    task = (jax.ShapeDtypeStruct(seed.shape, jnp.int32),) if with_task else ()
    return *_start_shapes(env, seed), *task

  if not env.host:
    return stages.Stage(start, 'reset')
  return stages.Stage(start, 'reset', 'batch', host=True, out_shapes=shapes)


def step_stage(env: env_lib.Env, first: bool, last: bool) -> stages.Stage:
  """One step of a simulator: a stage `state, env_action -> state, TimeStep`.

  Args:
    env: the simulator.
    first: whether it is the first step of a rollout, which restores what the
      last one saved, possibly in another process.
    last: whether it is the last step, which saves the environments.
  """
  saves = env.save is not None

  def shapes(state, env_action):
    token = state.token if saves and first else state
    B = token.shape[0]
    state = (
      Saved(token, _rows(env.snapshot_spec, B)) if saves and last else token
    )
    obs = _rows(env.obs_spec, B)
    row = jax.ShapeDtypeStruct((B,), jnp.float32)
    chunk = env_action.shape[1] if len(env_action.shape) > 2 else 1
    return state, env_lib.TimeStep(
      obs,
      reward=row,
      terminated=row,
      truncated=row,
      final_obs=obs,
      success=row,
      steps=row,
      env_failed=row,
      action_reward=jax.ShapeDtypeStruct((B, chunk), jnp.float32),
      chunk_success=row,
    )

  def step(state, env_action):
    token = env.load(*state) if saves and first else state
    if env.send is None:
      return finish(env.step(token, env_action))
    return stages.Deferred(env.send(token, env_action), finish)

  def finish(result):
    token, timestep = result
    return (_saved(env, token) if last else token), timestep

  return stages.Stage(
    step,
    'simulate',
    'batch' if env.lockstep else 'row',
    consumes=(0,),
    host=True,
    out_shapes=shapes,
    asynchronous=env.send is not None,
  )


def init(env: env_lib.Env, seed_B):
  """Starts episodes outside of a workflow's step: `seed_B -> state, obs`."""
  if not env.host:
    return jax.jit(env.init)(seed_B)
  start = lambda seed_B: _start(env, np.asarray(seed_B))
  if isinstance(seed_B, jax.core.Tracer):  # Such as for shapes alone.
    return jax.pure_callback(start, _start_shapes(env, seed_B), seed_B)
  return jax.tree.map(jnp.asarray, start(seed_B))


def _start(env: env_lib.Env, seed_B):
  token, obs = env.init(seed_B)
  return _saved(env, token), obs


def _saved(env: env_lib.Env, token):
  """A state that outlives the process of the simulator, if it can be saved."""
  return Saved(token, env.save(token)) if env.save else token


def _start_shapes(env: env_lib.Env, seed):
  """Shapes of what `_start` returns."""
  B = seed.shape[0]
  token = jax.ShapeDtypeStruct((B, 3), jnp.int32)
  if env.save:
    token = Saved(token, _rows(env.snapshot_spec, B))
  return token, _rows(env.obs_spec, B)


def _rows(spec, B: int):
  """Shapes with `B` rows, of a tree of shapes without."""
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct((B, *x.shape), x.dtype), spec
  )


def draw_seeds(n: int, group_size: int) -> stages.Stage:
  """Draws seeds: a stage `key -> seed_B`, `n` seeds, each `group_size` times.

  Rows of a group are adjacent.
  """

  def draw(key):
    key = jax.random.fold_in(key, core.SEEDS)
    most = jnp.iinfo(jnp.int32).max
    seed_N = jax.random.randint(key, (n,), 0, most, jnp.int32)
    return jnp.repeat(seed_N, group_size)

  return stages.Stage(draw, 'seeds', 'batch')
