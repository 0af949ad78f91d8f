"""Meta-World's scripted policies as a controller that demonstrations follow."""

import importlib.util

import jax
import numpy as np
import pytest

from rlinf_jax.envs import metaworld
from rlinf_jax.prepare import metaworld_script
from stages.envs import demonstrations

pytestmark = pytest.mark.skipif(
  importlib.util.find_spec('metaworld') is None,
  reason='Meta-World is not installed: pip install "rlinf-jax[metaworld]".',
)
TASKS = 'handle-press-v3', 'coffee-button-v3'


def test_each_environment_follows_the_policy_of_its_task():
  from metaworld.policies import ENV_POLICY_MAP

  controller = metaworld_script.published(TASKS, group_size=2)
  rng = np.random.default_rng(0)
  obs_BO = rng.uniform(-1, 1, (5, metaworld.STATE)).astype(np.float32)
  got_BA = jax.jit(jax.vmap(controller))(obs_BO)
  want_BA = [
    np.clip(ENV_POLICY_MAP[TASKS[n]]().get_action(obs_O.astype(float)), -1, 1)
    for n, obs_O in zip((0, 0, 1, 1, 0), obs_BO, strict=True)
  ]
  np.testing.assert_array_equal(got_BA, np.float32(want_BA))
  assert np.unique(got_BA, axis=0).shape == (5, metaworld.ACTION)


def test_other_observations_than_states_are_refused():
  controller = metaworld_script.published(TASKS)
  with pytest.raises(ValueError, match='read 39 numbers.*image_size = None'):
    controller(np.zeros(4, np.float32))
  with pytest.raises(metaworld.simulator.UnavailableError, match='reach-v3'):
    metaworld_script.published(('reach',))


@pytest.mark.slow
def test_demonstrations_do_the_task_of_each_environment():
  env = metaworld.env(TASKS, 2, horizon=50, terminate=True, reward='success')
  data, succeeded = demonstrations.collect(
    env,
    metaworld_script.published(TASKS),
    num_envs=2,
    noise_std=0.05,
    num_episodes=2,
  )
  assert succeeded == 2 and 40 < len(data.action) < 100
