"""Times ten denoising steps of π0 against one full pass of the same model.

  python -m experiments.vla.denoising

A full pass encodes pictures and instruction, and computes the velocity of one
chunk of fifty noisy actions; each further denoising step computes one more
velocity from the same keys and values. Prints the median seconds of both,
without compilation, and their ratio; with `--counted`, arithmetic and traffic
with memory, without running either. With `--published`, of the published sizes
in bfloat16, for an accelerator.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np

from experiments.vla import decoding
from stages import base
from stages.envs import env as env_lib
from stages.models.vision import vit
from stages.vla.pi0 import pi0, pi0_policy

SIZE, STEPS, PROMPT = 224, 10, 48
SMALL = pi0.Config(
  vit.Config(image_size=SIZE, patch_size=14, D=128, L=4, H=2, F=512),
  pi0.GEMMA(V=64, D=256, L=4, W=32, F=2048),
  pi0.GEMMA(V=1, D=128, L=4, W=32, F=512),
)


def env(cameras: int) -> env_lib.Env:
  """Observations and actions of a robot, without the robot."""
  image = jax.ShapeDtypeStruct((SIZE, SIZE, 3), jnp.uint8)
  names = ('front', 'left_wrist', 'right_wrist')[:cameras]
  return env_lib.Env(
    init=None,
    step=None,
    obs_spec={
      'image': dict.fromkeys(names, image),
      'state': jax.ShapeDtypeStruct((8,), jnp.float32),
    },
    action_low=(-1.0,) * 7,
    action_high=(1.0,) * 7,
    horizon=1,
  )


def policy(
  robot: env_lib.Env, config: pi0.Config, num_steps: int
) -> base.Policy:
  """A policy that denoises without exploration."""
  own = pi0_policy.policy(
    robot,
    config,
    instruction=tuple(np.arange(1, PROMPT + 1).tolist()),
    num_steps=num_steps,
    critic=False,
  )

  def act(params, obs, key_B):
    return own.act(params, obs, key_B, greedy=True)

  return own._replace(act=act)


def main(measure, config: pi0.Config):
  """Prints a line for each number of cameras and rows.

  Args:
    measure: `decoding.seconds` or `decoding.counted`.
    config: sizes of the model.
  """
  for cameras in 2, 3:
    robot = env(cameras)
    for rows in 1, 8:
      obs = jax.tree.map(
        lambda x, rows=rows: jnp.zeros((rows, *x.shape), x.dtype),
        robot.obs_spec,
      )
      ten, one = (
        measure(policy(robot, config, n), obs, rows, config.trunk.dtype)
        for n in (STEPS, 1)
      )
      ways = {f'{STEPS} denoising steps': ten, 'one': one}
      found = decoding.compared(ways)
      print(f'{cameras} cameras, {rows} rows: {found}', flush=True)


if __name__ == '__main__':
  main(
    decoding.counted if '--counted' in sys.argv[1:] else decoding.seconds,
    pi0.published(dtype='bfloat16') if '--published' in sys.argv[1:] else SMALL,
  )
