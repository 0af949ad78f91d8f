"""Steps per second of JAX environments with random actions in one `lax.scan`.

python -m experiments.jax_envs
"""

import time

import jax
import jax.numpy as jnp

from stages.envs import env as env_lib
from stages.envs import push, reach

ENVS = {'push': push.push(), 'reach': reach.reach()}
NUM_ENVS = 256, 1024, 4096
STEPS, REPEATS = 200, 7


def speed(env: env_lib.Env, B: int) -> float:
  """Environment steps per second: the median of some rollouts."""

  @jax.jit
  def play(state, key):
    def one(carry, t):
      state, total = carry
      action_BA = jax.random.uniform(
        jax.random.fold_in(key, t), (B, len(env.action_low)), minval=-1.0
      )
      state, timestep = env.step(state, action_BA)
      # The sum needs all that a policy would read, so nothing is optimized out.
      total += timestep.obs.sum() + timestep.final_obs.sum()
      return (state, total + timestep.reward.sum()), None

    return jax.lax.scan(one, (state, 0.0), jnp.arange(STEPS))[0]

  state, _ = jax.jit(env.init)(jnp.arange(B, dtype=jnp.int32))
  seconds = []
  for i in range(REPEATS + 1):
    start = time.perf_counter()
    state, _ = jax.block_until_ready(play(state, jax.random.key(i)))
    seconds.append(time.perf_counter() - start)
  return B * STEPS / sorted(seconds[1:])[REPEATS // 2]  # The first compiles.


def main():
  for name, env in ENVS.items():
    for B in NUM_ENVS:
      print(f'{name:6} {B:5} environments {speed(env, B):12,.0f} steps/s')


if __name__ == '__main__':
  main()
