"""Meta-World in a pool: a seed is a scene, and plays as it plays alone."""

import importlib.util
import sys

import numpy as np
import pytest

from rlinf_jax.envs import env_pool, metaworld, simulator

needs_metaworld = pytest.mark.skipif(
  importlib.util.find_spec('metaworld') is None,
  reason='Meta-World is not installed: pip install "rlinf-jax[metaworld]".',
)
TASK, HORIZON = 'reach-v3', 12


def actions(T, B):
  rng = np.random.default_rng(0)
  return rng.uniform(-1, 1, (T, B, 4)).astype(np.float32)


def alone(seed, action_TA):
  """Observations of Meta-World's own class, without any wrapper."""
  import metaworld as published

  tasks = published.MT1(TASK, seed=metaworld.SCENES_SEED).train_tasks
  env = published.ALL_V3_ENVIRONMENTS[TASK]()
  env.set_task(tasks[seed % len(tasks)])
  # Goals are shown, as the benchmark's own makers have it.
  env._partially_observable = False
  first, _ = env.reset()
  steps = [env.step(x) for x in action_TA]
  return np.float32([first, *(x[0] for x in steps)]), steps


@pytest.mark.slow
@needs_metaworld
def test_a_pool_plays_what_the_published_environment_plays():
  pool = env_pool.make_pool(metaworld.make, 2, 2, task=TASK, horizon=HORIZON)
  try:
    action_TBA = actions(HORIZON, 2)
    token, obs = pool.init([3, 57])
    got = [obs]
    for action_BA in action_TBA:
      token, timestep = pool.step(token, action_BA)
      got.append(timestep.final_obs)
    assert timestep.truncated.all() and not timestep.env_failed.any()
    for b, seed in enumerate((3, 57)):
      want, steps = alone(seed, action_TBA[:, b])
      np.testing.assert_array_equal(np.stack(got)[:, b], want)
      assert timestep.reward[b] == np.float32(steps[-1][1])
    assert (got[0][0] != got[0][1]).any()  # Two scenes.
    # A seed is the scene of that number, modulo fifty.
    _, again = pool.init([3, 7])
    np.testing.assert_array_equal(again, got[0])
  finally:
    pool.close()


@needs_metaworld
def test_names_that_meta_world_does_not_have_are_refused():
  with pytest.raises(simulator.UnavailableError, match='but .*reach-v3'):
    metaworld.make(0, 'reach-v2')


def test_a_missing_package_is_reported_with_what_to_install(monkeypatch):
  monkeypatch.setitem(sys.modules, 'metaworld', None)
  with pytest.raises(simulator.UnavailableError) as error:
    metaworld.make(0, TASK)
  assert 'pip install "rlinf-jax[metaworld]"' in str(error.value)
