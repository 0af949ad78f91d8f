"""Writes demonstrations of pushing, by a controller that knows the way.

python -m experiments.rlpd demonstrations.npz
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np

from stages import base, replay, rollout
from stages.worlds import push

ROOM = 0.3  # Between gripper and puck where one goes about the other.


def decide(obs):
  """Where the gripper shall go: about the puck, behind it, then forward."""
  gripper_X, puck_X, goal_X = obs[:2], obs[2:4], obs[4:6]
  far = jnp.linalg.norm(goal_X - puck_X) + 1e-6
  forth_X = (goal_X - puck_X) / far
  aside_X = jnp.stack([-forth_X[1], forth_X[0]])
  along, across = (gripper_X - puck_X) @ forth_X, (gripper_X - puck_X) @ aside_X
  side = jnp.where(across < 0, -1.0, 1.0)
  about_X = puck_X + ROOM * (side * aside_X - 0.5 * forth_X)
  behind_X = puck_X - 1.2 * push.TOUCH * forth_X
  forward_X = goal_X - push.TOUCH * forth_X - across * aside_X
  is_behind = along < -0.9 * push.TOUCH
  in_line = is_behind & (jnp.abs(across) < 0.03)
  is_free = (along < -0.1) | (jnp.abs(across) > 0.9 * ROOM)
  target_X = jnp.where(is_free, behind_X, about_X)
  target_X = jnp.where(in_line, forward_X, target_X)
  command_X = jnp.clip((target_X - gripper_X) / push.SPEED, -1.0, 1.0)
  return jnp.where(far < 0.5 * push.NEAR, 0.0, 1.0) * command_X


def act(params, obs_BO, key_B, *, group=1, greedy=False):
  del params, key_B, group, greedy
  command_BX, one_B = jax.vmap(decide)(obs_BO), jnp.ones(len(obs_BO))
  return base.Experience(obs_BO, command_BX, 0.0 * one_B, one_B, 0.0 * one_B)


def demonstrate(world: base.World, episodes: int):
  """Transitions of whole episodes, and how many of them end in success."""
  place, obs = rollout.begin(world, np.arange(episodes, dtype=np.int32))
  play = rollout.rollout(base.Policy(None, act, None), world, world.horizon)
  keys = jax.random.split(jax.random.key(0), episodes)
  *_, x, outcome = play((), (), place, obs, keys)
  rows = replay.Transition(
    x.obs, x.action, outcome.reward, 1.0 - outcome.terminated, outcome.final_obs
  )
  rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), rows)
  return rows, int(outcome.success[:, -1].sum())


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
