"""Records demonstrations of pushing, by a scripted controller.

python -m experiments.rlpd demonstrations.npz
"""

import argparse

import jax
import numpy as np

from stages.envs import demonstrations, push, replay
from stages.envs import env as env_lib
from stages.envs.rollouts import rollout


def record(env: env_lib.Env, episodes: int):
  """Returns transitions of whole episodes, and the number of successes."""
  env_state, obs = rollout.init(env, np.arange(episodes, dtype=np.int32))
  policy = demonstrations.scripted_policy(env, push.controller, noise_std=0.0)
  play = rollout.rollout(policy, env, env.horizon)
  keys = jax.random.split(jax.random.key(0), episodes)
  *_, x, timestep = play((), (), env_state, obs, keys)
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
  parser.add_argument('path', help='of the file to write')
  parser.add_argument('--episodes', type=int, default=20)
  args = parser.parse_args()
  rows, successes = record(push.push(dense=False), args.episodes)
  replay.write(args.path, rows)
  print(
    f'{successes} of {args.episodes} episodes succeed: '
    f'{len(rows.reward):,} steps in {args.path}.'
  )


if __name__ == '__main__':
  main()
