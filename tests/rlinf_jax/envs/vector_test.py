"""A vector environment equals a pool of as many, except for failures."""

from concurrent import futures
import functools
import importlib.util
import itertools
import multiprocessing

import gymnasium as gym
from gymnasium import vector as gym_vector
import jax
import numpy as np
import pytest

import claims
import env_toys
import in_memory
from planner.ir import flow as flow_lib
from planner.ir import plan as plan_lib
from rlinf_jax.envs import env_pool, gymnasium, maniskill, simulator, vector
from rlinf_jax.runtime import local
from stages import workflows
from stages.learn import optimizers
from stages.models.control import gaussian_policy

N, T, WIN = 4, 3 * env_toys.HORIZON, -11
SEEDS = np.arange(N, dtype=np.int32) + 40
SAME = gym_vector.AutoresetMode.SAME_STEP
KEY = jax.random.key(0)


def toy(name):
  return f'env_toys:toys/{name}-v0'


def same_step(name):
  return gym.make_vec(toy(name), N, vector_kwargs={'autoreset_mode': SAME})


def actions(wins=True):
  action_TNA = np.random.default_rng(0).uniform(-1, 1, (T, N, 1))
  if wins:
    action_TNA[3, 1] = action_TNA[12, 2] = WIN
  return action_TNA.astype(np.float32)


def play(env, action_TNA, seed_B=SEEDS):
  """All tokens and all that was seen."""
  token, obs = env.init(seed_B)
  timesteps = [(token, obs)]
  for action_NA in action_TNA:
    token, timestep = env.step(token, action_NA[: len(seed_B)])
    timesteps.append((token, timestep._replace(final_state=None)))
  return timesteps


@pytest.fixture
def pool():
  pools = []

  def make_pool(name, n=N):
    pools.append(env_pool.make_pool(gymnasium.make, n, 2, name=name))
    return env_pool.from_pool(pools[-1])

  yield make_pool
  for pool in pools:
    pool.close()


def equal(x, y):
  jax.tree.map(np.testing.assert_array_equal, x, y)


@pytest.mark.parametrize(
  'name, B',
  claims.some(
    [*itertools.product((toy('Count'), toy('See'), 'CartPole-v1'), (N, N - 1))],
    keep=[(toy('Count'), N), (toy('See'), N - 1), ('CartPole-v1', N)],
  ),
)
def test_a_vector_environment_equals_a_pool_to_the_bit(pool, name, B):
  want = pool(name)
  mode = {'vectorization_mode': 'sync'} if name == 'CartPole-v1' else {}
  if mode:
    disabled = gym_vector.AutoresetMode.DISABLED
    mode['vector_kwargs'] = {'autoreset_mode': disabled}
  got = vector.env(name, N, **mode)
  assert got.obs_spec == want.obs_spec and got.horizon == want.horizon
  assert (got.action_low, got.action_high) == (
    want.action_low,
    want.action_high,
  )
  action_TNA = actions(toy('') < name)
  if name == 'CartPole-v1':
    action_TNA = np.random.default_rng(0).integers(0, 2, (60, N, 1))
  equal(play(got, action_TNA, SEEDS[:B]), play(want, action_TNA, SEEDS[:B]))


def test_same_step_autoreset_keeps_final_observations():
  vector_env = vector.wrap(same_step('Again'))
  timesteps = play(vector_env, actions())
  for i in range(N):
    env = gym.make(toy('Again'))
    obs, _ = env.reset(seed=int(SEEDS[i]))
    np.testing.assert_array_equal(timesteps[0][1][i], obs)
    for (_, got), action_NA in zip(timesteps[1:], actions(), strict=True):
      obs, reward, terminated, truncated, info = env.step(action_NA[i])
      np.testing.assert_array_equal(got.final_obs[i], obs)
      want = reward, terminated, truncated and not terminated, info['success']
      assert want == (
        got.reward[i],
        got.terminated[i],
        got.truncated[i],
        got.success[i],
      )
      if terminated or truncated:
        obs, _ = env.reset()
      np.testing.assert_array_equal(got.obs[i], obs)


class FixedInfo(gym_vector.VectorEnv):
  """One row that ends with success; infos are the given ones."""

  metadata = {'autoreset_mode': SAME}
  num_envs = 2
  single_observation_space = gym.spaces.Box(-1, 1, (1,))
  single_action_space = gym.spaces.Box(-1, 1, (1,))

  def __init__(self, info, begins=0.0):
    self.info, self.begins = info, begins

  def reset(self, *, seed=None, options=None):
    return np.full((2, 1), self.begins, np.float32), {}

  def step(self, action):
    ended = np.array([True, False])
    return self.reset()[0], np.ones(2), ended, ~ended & ended, self.info


def test_infos_of_the_next_episode_are_not_taken_for_the_last():
  final = np.full((2, 1), 0.5, np.float32)
  info = {'success': np.array([True, True]), 'final_obs': final}
  env = vector.wrap(FixedInfo(info | {'final_info': {}}), horizon=5)
  _, timestep = env.step(env.init([1, 2])[0], np.zeros((2, 1)))
  assert timestep.success.tolist() == [0, 1]
  assert timestep.final_obs.ravel().tolist() == [0.5, 0]
  env = vector.wrap(FixedInfo({}), horizon=5)
  with pytest.raises(RuntimeError, match='infos have none of'):
    env.step(env.init([1, 2])[0], np.zeros((2, 1)))
  with pytest.raises(RuntimeError, match='Environment 0 .* seed 1 began'):
    vector.wrap(FixedInfo({}, begins=np.nan), horizon=5).init([1, 2])


def test_unsupported_vector_environments_are_refused():
  next_step = gym.make_vec(toy('Again'), 2)
  with pytest.raises(ValueError, match="'NextStep'.*SAME_STEP or DISABLED"):
    vector.wrap(next_step)
  endless = gym_vector.SyncVectorEnv([env_toys.Again] * 2, autoreset_mode=SAME)
  with pytest.raises(ValueError, match='no limit of steps'):
    vector.wrap(endless)
  env = vector.wrap(endless, horizon=5)
  assert env.horizon == 5
  with pytest.raises(ValueError, match='3 seeds for 2 environments'):
    env.init([1, 2, 3])
  token, _ = env.init([1, 2])
  env.step(token, actions()[0, :2])
  with pytest.raises(ValueError, match='each token is used once'):
    env.step(token, actions()[0, :2])


def test_a_non_finite_observation_costs_one_episode(pool):
  action_TNA = actions()
  action_TNA[5, 3] = 40
  timesteps = play(vector.env(toy('Count'), N), action_TNA)
  reference = play(pool(toy('Count')), actions())
  rest = lambda x: jax.tree.map(lambda leaf: leaf[:3], x)
  equal(rest(timesteps), rest(reference))
  lost = np.array([x.env_failed for _, x in timesteps[1:]])
  assert lost.sum() == lost[5, 3] == 1
  _, timestep = timesteps[6]
  assert timestep.truncated[3] == 1 and timestep.reward[3] == 0
  np.testing.assert_array_equal(timestep.final_obs[3], timesteps[5][1].obs[3])
  assert timestep.obs[3, 1] == 0  # A new episode.
  with pytest.raises(RuntimeError, match='Environment 3 .* at call 5.*DISABL'):
    play(vector.wrap(same_step('Again')), action_TNA)


def test_another_process_starts_new_episodes_and_reports_it():
  messages = []
  make = lambda: vector.wrap(same_step('Again'), say=messages.append)
  one, other = make(), make()
  token, _ = play(one, actions()[:5])[-1]
  assert one.load(token, one.save(token)) is token and not messages
  after = other.load(token, one.save(token))
  np.testing.assert_array_equal(after, token)
  assert messages == [
    'Episodes started anew, as a vector environment is not saved: 4.'
  ]
  _, timestep = other.step(after, actions()[5])
  assert (timestep.obs[:, 1] == 1).all()
  first = simulator.episode_seed(int(SEEDS[0]), 5) % 1000
  assert timestep.obs[0, 0] == first


@pytest.mark.slow
def test_ppo_is_the_same_in_a_pool_a_vector_environment_and_pieces(pool):
  make = lambda env: workflows.embodied_ppo(
    env,
    functools.partial(gaussian_policy.policy, width=8),
    optimizers.adamw(1e-2),
    num_envs=N,
    num_steps=9,
  )
  results = []
  for env in (pool(toy('Count')), vector.env(toy('Count'), N)):
    workflow = make(env)
    state = workflow.init(KEY)
    state, info = workflow.step(state, (), KEY)
    results.append((workflow.params(state), info))
  equal(*results)
  workflow = make(vector.env(toy('Count'), N))
  state = workflow.init(KEY)
  flow = flow_lib.trace(workflow.step, state, (), KEY)
  plan = plan_lib.parse({'pieces': 2}, flow.stages)
  planned = local.LocalRuntime(plan, step=flow)
  in_memory.start(planned, state)
  planned.step((), KEY)
  near = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
  jax.tree.map(near, workflow.params(in_memory.state(planned)), results[0][0])
  planned.close()


def theirs(T):
  """Time steps of ManiSkill's own vector environment as an Env."""
  maniskill.make(0, 'PushCube-v1').close()  # Skips without rendering.
  from mani_skill.vector.wrappers import gymnasium as wrappers

  env = wrappers.ManiSkillVectorEnv(
    'PushCube-v1',
    num_envs=1,
    control_mode='pd_joint_delta_pos',
    reward_mode='normalized_dense',
    sim_backend='physx_cpu',
    render_backend='none',
  )
  vector_env = vector.wrap(env, horizon=50)
  return play(vector_env, arm(T), SEEDS[:1])


def arm(T):
  action_T1A = np.random.default_rng(0).uniform(-1, 1, (T, 1, 8))
  return action_T1A.astype(np.float32)


@pytest.mark.slow
@pytest.mark.skipif(
  importlib.util.find_spec('mani_skill') is None,
  reason='ManiSkill is not installed: pip install "rlinf-jax[maniskill]"',
)
def test_maniskills_vector_environment_equals_its_environment():
  """Of torch's tensors; here on a processor, where it holds one scene."""
  T = 50  # It begins further episodes by seeds of its own.
  env = maniskill.env('PushCube-v1', 1)
  want = play(env, arm(T), SEEDS[:1])
  spawn = multiprocessing.get_context('spawn')
  with futures.ProcessPoolExecutor(1, spawn) as process:
    got = process.submit(theirs, T).result()
  (_, last), (_, end) = got.pop(), want.pop()
  equal(got, want)
  assert last.truncated == end.truncated == 1
  equal(last.final_obs, end.final_obs)
