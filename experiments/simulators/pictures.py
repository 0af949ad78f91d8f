"""Compares rollouts from pictures with the push world alone.

  python -m experiments.simulators.pictures

The policy is a small OpenVLA-OFT, of the sizes of `experiments/vla`. Alone, the
environments take actions drawn at random, in the same compiled loop, and draw
the same pictures. Both take turns; the time is that of the process on all
cores, so that other work on the machine counts for little. Prints the medians
and the share of the speed that is left.
"""

import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

import stages
from stages import base
from stages.envs import action_chunks, push
from stages.envs import env as env_lib
from stages.envs.rollouts import obs_stats, rollout
from stages.models import transformer
from stages.models.vision import vit
from stages.vla import pictures
from stages.vla.openvla import openvla, openvla_oft, openvla_oft_env

PIXELS, CHUNK, ENVS, CHUNKS, TURNS = 32, 2, 256, 25, 5
TOWER = {'image_size': PIXELS, 'D': 32, 'L': 2, 'H': 2, 'F': 64}


def model(patch: int) -> openvla_oft.Config:
  """The model of `experiments/vla`, which cuts pictures into patches."""
  tower = TOWER | {'patch_size': patch}
  sizes = dict.fromkeys('HK', 2)
  return openvla_oft.Config(
    openvla.Config(
      vit.Config(has_class=True, registers=1, layer_scale=True, **tower),
      vit.Config(activation='gelu', **tower),
      transformer.Config(
        V=32,
        D=64,
        L=2,
        W=32,
        F=128,
        qkv_bias=False,
        tie_embeddings=False,
        **sizes,
      ),
      padded=8,
      bins=16,
      pictures=pictures.Pictures(sizes=(PIXELS, PIXELS)),
    ),
    Z=CHUNK,
    A=2,
    O=2,
  )


def at_random(env: env_lib.Env) -> base.Policy:
  """A policy without a model, which draws each action within its bounds."""
  low, high = jnp.array([env.action_low, env.action_high])
  shape = CHUNK, len(low)

  def act(params, obs, key_B, *, group_size=1, greedy=False):
    action_BZA = jax.vmap(
      lambda key: jax.random.uniform(key, shape, minval=low, maxval=high)
    )(key_B)
    one_B = jnp.ones(len(key_B))
    return base.Experience(
      obs, action_BZA, logp=0 * one_B, mask=one_B, truncated=0 * one_B
    )

  return base.Policy(init=lambda key: (), act=act, evaluate=None)


def seconds(env: env_lib.Env, policy: base.Policy):
  """Makes a function that returns CPU-seconds of a rollout."""
  run = jax.jit(rollout.rollout(policy, env, CHUNKS).run)
  given = policy.init(jax.random.key(0)), obs_stats.init(env.obs_spec)

  def once(turn: int) -> float:
    state, obs = jax.block_until_ready(
      env.init(np.arange(ENVS, dtype=np.int32))
    )
    keys = stages.keys(jax.random.key(turn), obs)
    start = time.process_time()
    jax.block_until_ready(run(*given, state, obs, keys))
    return time.process_time() - start

  return once


def main():
  """Prints a line for each size of the patches."""
  env = action_chunks.chunked(
    push.push(dense=False, terminate=True, image_size=PIXELS),
    chunk_size=CHUNK,
    discount=0.95,
  )
  for patch in 8, 16:
    policy = openvla_oft_env.policy(
      env, config=model(patch), instruction=(1, 3), state='state', critic=True
    )
    cases = [seconds(env, some) for some in (at_random(env), policy)]
    took = [[case(turn) for case in cases] for turn in range(TURNS + 1)]
    # The first turn compiles.
    bare, acting = map(statistics.median, zip(*took[1:], strict=True))
    steps = ENVS * CHUNKS * CHUNK
    print(
      f'patches of {patch}: {steps / bare:.0f} steps a CPU-second alone, '
      f'{steps / acting:.0f} in a rollout, {bare / acting:.2f} of it',
      flush=True,
    )


if __name__ == '__main__':
  main()
