"""Several actions at a time: a world that is told what to do next, and then."""

import jax
import jax.numpy as jnp

from stages import base


def chunked(world: base.Env, steps: int, discount: float) -> base.Env:
  """The world whose commands are chunks, [B, Z, A], of as many steps.

  A chunk ends where the episode does: what it says beyond is not done, and the
  next chunk begins with the next episode.

  Args:
    world: of JAX, that takes one command at a time.
    steps: Z.
    discount: γ, by which a chunk's reward is Σₖ γᵏ rₖ. What follows it counts
      for γⁿ, where n is `TimeStep.steps`.
  """

  def step(state, command_BZA):
    if command_BZA.shape[1] != steps:
      raise ValueError(
        f'Chunks of {command_BZA.shape[1]} commands were given to a world of '
        f'chunks of {steps}: give the policy the same `chunk`.'
      )
    state, so_far = world.step(state, command_BZA[:, 0])
    so_far = so_far._replace(steps=jnp.ones_like(so_far.reward))
    for z in range(1, steps):
      goes_on_B = (so_far.terminated + so_far.truncated) == 0
      new, now = world.step(state, command_BZA[:, z])
      n_B = so_far.steps
      now = now._replace(
        reward=so_far.reward + discount**n_B * now.reward,
        success=jnp.maximum(so_far.success, now.success),
        steps=n_B + 1.0,
      )
      state, so_far = jax.tree.map(
        lambda a, b: jnp.where(_as_rows(goes_on_B, a), a, b),
        (new, now),
        (state, so_far),
      )
    return state, so_far

  return world._replace(step=step, horizon=-(-world.horizon // steps))


def _as_rows(x_B, like):
  return x_B.reshape(x_B.shape + (1,) * (like.ndim - 1))
