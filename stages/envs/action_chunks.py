"""Environments that execute a chunk of actions per step."""

import jax
import jax.numpy as jnp

from stages.envs import env as env_lib


def chunked(env: env_lib.Env, chunk_size: int, discount: float) -> env_lib.Env:
  """Wraps an environment so that a step takes a chunk of actions, [B, Z, A].

  A chunk ends where its episode does: its remaining actions are dropped, and
  the next chunk starts with the next episode. So a horizon need not be a
  multiple of Z: the last chunk of an episode is then cut short.

  Args:
    env: a JAX environment that takes one action per step.
    chunk_size: Z.
    discount: γ. The reward of a chunk is Σₖ γᵏ rₖ, and what follows it is
      discounted by γⁿ, where n is `TimeStep.steps`.
  """

  def step(state, action_BZA):
    if action_BZA.shape[1] != chunk_size:
      raise ValueError(
        f'Chunks of {action_BZA.shape[1]} actions were given to an environment '
        f'that takes chunks of {chunk_size}: give the policy the same `chunk`.'
      )
    state, so_far = env.step(state, action_BZA[:, 0])
    so_far = so_far._replace(
      steps=jnp.ones_like(so_far.reward),
      action_reward=jnp.pad(
        so_far.reward[:, None], ((0, 0), (0, chunk_size - 1))
      ),
      chunk_success=so_far.success,
    )
    for z in range(1, chunk_size):
      running_B = (so_far.terminated + so_far.truncated) == 0
      new_state, timestep = env.step(state, action_BZA[:, z])
      n_B = so_far.steps
      timestep = timestep._replace(
        reward=so_far.reward + discount**n_B * timestep.reward,
        steps=n_B + 1.0,
        action_reward=so_far.action_reward.at[:, z].set(timestep.reward),
        chunk_success=jnp.maximum(so_far.chunk_success, timestep.success),
      )
      state, so_far = jax.tree.map(
        lambda a, b: jnp.where(_expand_dims(running_B, a), a, b),
        (new_state, timestep),
        (state, so_far),
      )
    return state, so_far

  return env._replace(step=step, horizon=-(-env.horizon // chunk_size))


def _expand_dims(x_B, like):
  """`[B] -> [B, 1, …]`, of the rank of `like`."""
  return x_B.reshape(x_B.shape + (1,) * (like.ndim - 1))
