"""Writes demonstrations of pushing, by a controller that knows the way.

python -m experiments.rlpd demonstrations.npz
"""

import argparse

import jax
import numpy as np

from stages import base
from stages.envs import demonstrations, push, replay, rollout


def demonstrate(world: base.Env, episodes: int):
  """Transitions of whole episodes, and how many of them end in success."""
  place, obs = rollout.init(world, np.arange(episodes, dtype=np.int32))
  policy = demonstrations.scripted_policy(world, push.show_how, noise_std=0.0)
  play = rollout.rollout(policy, world, world.horizon)
  keys = jax.random.split(jax.random.key(0), episodes)
  *_, x, timestep = play((), (), place, obs, keys)
  rows = replay.Transition(
    x.obs,
    x.action,
    timestep.reward,
    1.0 - timestep.terminated,
    timestep.final_obs,
  )
  rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), rows)
  return rows, int(timestep.success[:, -1].sum())


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('path', help='where to')
  parser.add_argument('--episodes', type=int, default=20)
  given = parser.parse_args()
  rows, good = demonstrate(push.push(dense=False), given.episodes)
  replay.write(given.path, rows)
  print(
    f'{good} of {given.episodes} episodes succeed: {len(rows.reward):,} steps '
    f'in {given.path}.'
  )


if __name__ == '__main__':
  main()
