"""Steps a second of worlds of JAX, acted in at random inside one `lax.scan`.

python -m experiments.worlds
"""

import time

import jax
import jax.numpy as jnp

from stages.envs import push, reach

WORLDS = {'push': push.push(), 'reach': reach.reach()}
ROWS = 256, 1024, 4096
STEPS, TIMES = 200, 7


def speed(world, B: int) -> float:
  """Environment steps a second: the median of some rollouts."""

  @jax.jit
  def play(state, key):
    def one(carry, t):
      state, seen = carry
      command_BA = jax.random.uniform(
        jax.random.fold_in(key, t), (B, len(world.action_low)), minval=-1.0
      )
      state, timestep = world.step(state, command_BA)
      # All that a policy would read is computed.
      seen += timestep.obs.sum() + timestep.final_obs.sum()
      return (state, seen + timestep.reward.sum()), None

    return jax.lax.scan(one, (state, 0.0), jnp.arange(STEPS))[0]

  state, _ = jax.jit(world.init)(jnp.arange(B, dtype=jnp.int32))
  taken = []
  for i in range(TIMES + 1):
    begin = time.perf_counter()
    state, _ = jax.block_until_ready(play(state, jax.random.key(i)))
    taken.append(time.perf_counter() - begin)
  return B * STEPS / sorted(taken[1:])[TIMES // 2]  # The first compiles.


def main():
  for name, world in WORLDS.items():
    for B in ROWS:
      print(f'{name:6} {B:5} environments {speed(world, B):12,.0f} steps/s')


if __name__ == '__main__':
  main()
