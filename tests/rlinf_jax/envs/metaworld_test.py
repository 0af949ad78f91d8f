"""Meta-World in a pool: a seed is a scene, and plays as it plays alone."""

import importlib.util
import sys

import gin
import numpy as np
import pytest

import jax_envs
from rlinf_jax.config import config
from rlinf_jax.envs import env_pool, metaworld, simulator
from stages import base

needs_metaworld = pytest.mark.skipif(
  importlib.util.find_spec('metaworld') is None,
  reason='Meta-World is not installed: pip install "rlinf-jax[metaworld]".',
)
TASK, HORIZON = 'reach-v3', 12
TASKS = TASK, 'door-open-v3'


def actions(T, B):
  rng = np.random.default_rng(0)
  return rng.uniform(-1, 1, (T, B, 4)).astype(np.float32)


def alone(seed, action_TA, task=TASK):
  """Observations of Meta-World's own class, without any wrapper."""
  import metaworld as published

  tasks = published.MT1(task, seed=metaworld.SCENES_SEED).train_tasks
  env = published.ALL_V3_ENVIRONMENTS[task]()
  env.set_task(tasks[seed % len(tasks)])
  # Goals are shown, as the benchmark's own makers have it.
  env._partially_observable = False
  first, _ = env.reset()
  steps = [env.step(x) for x in action_TA]
  return np.float32([first, *(x[0] for x in steps)]), steps


@pytest.mark.slow
@needs_metaworld
def test_a_pool_plays_what_the_published_environment_plays():
  pool = env_pool.make_pool(
    metaworld.make, 2, 2, tasks=(TASK,), horizon=HORIZON
  )
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


def pictured(**settings):
  """Two environments in one process: of `TASK` and of another."""
  return env_pool.make_pool(
    metaworld.make,
    2,
    1,
    tasks=TASKS,
    horizon=HORIZON,
    settle_steps=2,
    image_size=24,
    **settings,
  )


@pytest.mark.slow
@needs_metaworld
def test_tasks_are_seen_in_pictures_and_read_in_words():
  prompts = {'token': np.arange(6).reshape(2, 3), 'mask': np.ones((2, 3), int)}
  pool = pictured(reward='success', prompts=prompts, video=True)
  in_chunks = pictured(chunk=3)
  try:
    action_TBA = actions(3, 2)
    token, obs = pool.init([4, 7])
    # The states of tasks alone, in scenes 4 // 2 and 7 // 2, after two steps
    # without motion, which do not count.
    for b, (task, scene) in enumerate(zip(TASKS, (2, 3), strict=True)):
      want, _ = alone(scene, np.zeros((2, 4), np.float32), task)
      np.testing.assert_array_equal(obs['state'][b], want[2, :4])
    np.testing.assert_array_equal(obs['prompt']['token'], prompts['token'])
    image = obs['image']['front']
    assert image.shape == (2, 24, 24, 3) and image.std((1, 2, 3)).min() > 10
    assert np.abs(image[0].astype(float) - image[1]).mean() > 5
    for action_BA in action_TBA:
      token, timestep = pool.step(token, action_BA)
      np.testing.assert_array_equal(timestep.reward, timestep.success)
    # A chunk draws once, after its last action.
    chunk_token, obs = in_chunks.init([4, 7])
    texts = [bytes(x).rstrip(b'\0').decode() for x in obs['instruction']]
    assert texts == ['reach', 'door open']
    _, of_chunk = in_chunks.step(chunk_token, np.moveaxis(action_TBA, 0, 1))
    np.testing.assert_array_equal(of_chunk.steps, [3, 3])
    got, want = of_chunk.obs, timestep.obs
    np.testing.assert_array_equal(got['state'], want['state'])
    np.testing.assert_array_equal(got['image']['front'], want['image']['front'])
    for t in range(3, HORIZON):
      token, timestep = pool.step(token, 0 * action_TBA[0])
      assert timestep.truncated.all() == (t == HORIZON - 1)
    assert pool.spec.image.shape == (24, 24, 3)
    assert in_chunks.spec.image is None
  finally:
    pool.close()
    in_chunks.close()


@pytest.mark.slow
@needs_metaworld
def test_fast_pictures_lack_shadows_and_reflections():
  pools = [pictured(), pictured(fast_rendering=True)]
  try:
    (_, slow), (_, fast) = (pool.init([4, 7]) for pool in pools)
    np.testing.assert_array_equal(slow['state'], fast['state'])
    slow, fast = (obs['image']['front'].astype(float) for obs in (slow, fast))
    # Brighter where shadows were, darker where reflections were.
    assert 1 < np.abs(fast - slow).mean() < 10
    assert np.corrcoef(fast.ravel(), slow.ravel())[0, 1] > 0.95
  finally:
    for pool in pools:
      pool.close()


def test_environments_tell_their_tasks_by_name(monkeypatch):
  made = {}

  def env(make, num_envs, num_processes, **settings):
    made.update(settings)
    return jax_envs.line()

  monkeypatch.setattr(env_pool, 'env', env)
  own = metaworld.env(
    TASKS,
    4,
    descriptions={TASK: 'reach a goal'},
    instructions=lambda texts: base.Prompt(
      [len(text) for text in texts], [1, 1]
    ),
  )
  assert own.tasks == TASKS
  assert made['prompts']['token'].tolist() == [12, 9]
  token_B3 = np.arange(4, dtype=np.int32)[:, None] * [1, 0, 0]
  assert own.task(token_B3).tolist() == [0, 1, 0, 1]
  assert own.equal_rows == 1
  of_groups = metaworld.env(TASKS, 8, group_size=4, equal_tasks=True)
  assert of_groups.equal_rows == 8


def test_settings_that_meta_world_cannot_follow_are_refused():
  with pytest.raises(ValueError, match='500 steps, .* 490 after 15'):
    metaworld.make(0, TASKS, horizon=490, settle_steps=15)
  with pytest.raises(ValueError, match=r"make it \('reach-v3',\)"):
    metaworld.env(TASK, 4)
  with pytest.raises(ValueError, match='3 environments are no multiple of 2'):
    metaworld.env(TASKS, 3, equal_tasks=True)


@needs_metaworld
def test_the_recipe_has_all_tasks():
  import metaworld as published

  config.parse(
    ['gin_configs/ppo_pi0_metaworld.gin'], ["MODEL = 'none'"], 'unused'
  )
  tasks = gin.query_parameter('metaworld.env.tasks')
  assert len(tasks) == 50 and {*tasks} == {*published.ALL_V3_ENVIRONMENTS}


@needs_metaworld
def test_names_that_meta_world_does_not_have_are_refused():
  with pytest.raises(simulator.UnavailableError, match='but .*reach-v3'):
    metaworld.make(0, ('reach-v2',))
  with pytest.raises(simulator.UnavailableError, match="no task 'reach', but"):
    metaworld.make(0, TASKS, descriptions={'reach': 'reach a goal'})


def test_a_missing_package_is_reported_with_what_to_install(monkeypatch):
  monkeypatch.setitem(sys.modules, 'metaworld', None)
  with pytest.raises(simulator.UnavailableError) as error:
    metaworld.make(0, (TASK,))
  assert 'pip install "rlinf-jax[metaworld]"' in str(error.value)
