"""The script that pushes a cube, by its actions and in ManiSkill."""

import importlib.util

import numpy as np
import pytest

from rlinf_jax.envs import maniskill
from rlinf_jax.prepare import cube_script
from stages.envs import demonstrations

CUBE = (0.05, 0.02, 0.02)


def action(tcp):
  """The action of the script for a position of the hand."""
  obs_O = np.zeros(35, np.float32)
  obs_O[18:21], obs_O[28:31] = tcp, CUBE
  return np.asarray(cube_script.push(obs_O))


@pytest.mark.parametrize(
  'tcp, want',
  [
    # From above, to the place behind the cube.
    ((0.0, 0.0, 0.2), (-1.0, 0.2, -1.0)),
    # Down, there.
    ((-0.15, 0.02, 0.1), (-0.1, 0.0, -0.75)),
    # Ahead, behind the cube or with it.
    ((-0.15, 0.02, 0.025), (0.8, 0.0, 0.0)),
    ((0.1, 0.0, 0.025), (0.8, 0.2, 0.0)),
    # Straight up, where the cube was missed.
    ((0.0, 0.07, 0.025), (0.0, -0.5, 0.75)),
  ],
)
def test_the_hand_moves_behind_the_cube_goes_down_and_pushes(tcp, want):
  np.testing.assert_allclose(action(tcp), [*want, -1.0], atol=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(
  importlib.util.find_spec('mani_skill') is None,
  reason='ManiSkill is not installed: pip install "rlinf-jax[maniskill]"',
)
def test_every_cube_is_pushed_to_the_goal():
  env = maniskill.env(
    'PushCube-v1',
    4,
    control_mode='pd_ee_delta_pos',
    reward_mode='sparse',
    horizon=24,
  )
  data, succeeded = demonstrations.collect(
    env, cube_script.push, num_envs=4, noise_std=0.1, num_episodes=4
  )
  assert succeeded == 4 and 4 * 10 < len(data.action) < 4 * 20
