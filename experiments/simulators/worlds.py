"""Environments to simulate, how one is built, and a policy for them."""

from collections.abc import Callable
import functools
from typing import NamedTuple

from experiments.vla import decoding
from rlinf_jax.envs import libero, maniskill
from stages import base
from stages.envs import env as env_lib
from stages.models.control import gaussian_policy
from stages.vla.openvla import openvla_oft, openvla_oft_env

PIXELS, CHUNK = 224, 8
PROMPT = tuple(range(1, 21))  # As long as an instruction.


class World(NamedTuple):
  """A simulator, as a policy and as a plain loop use it.

  Attributes:
    env: environments in processes.
    make: `index -> environment`, for a process without a policy.
    policy: that acts in `env`.
    chunk: actions that it decides at a time.
  """

  env: env_lib.Env
  make: Callable
  policy: base.Policy
  chunk: int


def states(task: str, n: int, processes: int) -> World:
  """A task of ManiSkill by states, and two layers of 128."""
  env = maniskill.env(task, n, processes)
  make = functools.partial(maniskill.make, task=task)
  return World(env, make, gaussian_policy.policy(env, width=128), 1)


def pictures(suite: str, n: int, processes: int) -> World:
  """A suite of LIBERO by its main camera, and a small OpenVLA-OFT.

  It reads 256 patches and decides eight actions at a time.
  """
  settings = {'cameras': ('front',), 'image_size': PIXELS}
  env = libero.env(suite, n, processes, chunk=CHUNK, **settings)
  config = openvla_oft.Config(
    decoding.config(PIXELS, 256, 4), Z=CHUNK, A=len(env.action_low)
  )
  policy = openvla_oft_env.policy(
    env,
    config=config,
    instruction=PROMPT,
    cameras=('image/front',),
    critic=False,
  )
  make = functools.partial(libero.make, suite=suite, **settings)
  return World(env, make, policy, CHUNK)
