"""Simulators in worker processes: the same episodes after any failure."""

import time

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import claims
import env_toys
import in_memory
from planner.ir import flow as flow_lib
from planner.ir import plan as plan_lib
from rlinf_jax import train
from rlinf_jax.envs import env_pool, simulator
from rlinf_jax.envs.processes import episode_log
from rlinf_jax.planning import autoplan
from rlinf_jax.runtime import local
import saved
import stages
from stages import workflows
from stages.envs import seed_source
from stages.envs.rollouts import rollout
from stages.learn import optimizers as optimizers_lib
from stages.models.control import gaussian_policy
from tests.rlinf_jax.envs.processes import counting
from tests.rlinf_jax.run.end_to_end import language_run_test

RESTORED = 'Episodes restored by their seeds and actions: '


def bare(seed_B, action_TBA):
  """Time steps of a plain loop over environments without a pool."""
  rows = []
  for b, seed in enumerate(seed_B):
    env, row = gym.make(counting.TOY), []
    obs = env.reset(seed=int(seed))[0]
    for t, action_A in enumerate(action_TBA[:, b]):
      obs, reward, terminated, truncated, info = env.step(action_A)
      final = obs
      if terminated or truncated:
        obs, _ = env.reset(seed=simulator.episode_seed(int(seed), t + 1))
      ends = terminated, truncated and not terminated, info['success']
      row.append((obs, final, reward, *ends))
    rows.append(row)
  return [
    [np.stack([row[t][k] for row in rows]) for k in range(6)]
    for t in range(len(action_TBA))
  ]


@pytest.mark.parametrize('processes', [1, 2, 4])
def test_a_pool_equals_a_loop_over_bare_environments(make, processes):
  seed_B, action_TBA = np.arange(5) + 7, counting.actions(30, 5)
  pool, _ = make(5, processes)
  token, obs = pool.init(seed_B)
  np.testing.assert_array_equal(obs[:, 0], seed_B)
  wanted = bare(seed_B, action_TBA)
  for action_BA, want in zip(action_TBA, wanted, strict=True):
    token, timestep = pool.step(token, action_BA)
    got = timestep.obs, timestep.final_obs, timestep.reward
    got += timestep.terminated, timestep.truncated, timestep.success
    for x, y in zip(got, want, strict=True):
      np.testing.assert_array_equal(x, y.astype(np.float32))
  assert sum(want[3].sum() for want in wanted)  # Both kinds of ends occurred.
  assert sum(want[4].sum() for want in wanted)


def test_stepping_halves_in_turn_equals_stepping_all_at_once(make):
  seed_B, action_TBA = np.arange(6), counting.actions(20, 6)
  whole, _ = make(6, 2)
  halves, _ = make(6, 2)
  token, _ = whole.init(seed_B)
  both, _ = halves.init(seed_B)
  tokens, sent = [both[:3], both[3:]], [None, None]
  for action_BA in action_TBA:
    token, want = whole.step(token, action_BA)
    sent = [
      halves.send(one, half)
      for one, half in zip(tokens, np.split(action_BA, 2), strict=True)
    ]
    # Received in the opposite order.
    second, first = halves.recv(sent[1]), halves.recv(sent[0])
    tokens = [first[0], second[0]]
    all_three = map(jax.tree.leaves, (want, first[1], second[1]))
    for x, y, z in zip(*all_three, strict=True):
      np.testing.assert_array_equal(x, np.concatenate([y, z]))
  np.testing.assert_array_equal(token, np.concatenate(tokens))


def test_a_discrete_action_is_its_index(make):
  pool, _ = make(2, 1, name='CartPole-v1')
  assert pool.spec.horizon == 500 and pool.spec.choices == (2,)
  token, obs = pool.init([3, 4])
  env = gym.make('CartPole-v1')
  want, _ = env.reset(seed=4)
  for choice in (0, 1, 1):
    np.testing.assert_array_equal(obs[1], want)
    token, timestep = pool.step(token, [[1 - choice], [choice]])
    want, *_ = env.step(choice)
    obs = timestep.obs


def test_dict_observations_keep_names_and_images(make):
  pool, _ = make(2, 1, name='env_toys:toys/See-v0')
  env = env_pool.from_pool(pool)
  assert env.obs_spec['eye']['front'] == jax.ShapeDtypeStruct(
    (4, 6, 3), jnp.uint8
  )
  assert env.obs_spec['state'] == jax.ShapeDtypeStruct((4,), jnp.float32)
  token, obs = pool.init([3, 4])
  np.testing.assert_array_equal(obs['eye']['front'][1], np.full((4, 6, 3), 4))
  token, timestep = counting.act(pool, token, 0, 0)
  np.testing.assert_array_equal(timestep.obs['eye']['front'][0].max(), 4)


@stages.stage('decide')
def decide(obs):
  return jnp.cos(obs[:, :1] + obs[:, 3:])


def workflow(pool):
  simulate = [
    rollout.step_stage(env_pool.from_pool(pool), t == 0, t == 4)
    for t in range(5)
  ]

  def step(state, batch, key):
    del batch, key
    token, obs = state
    for t in range(5):
      token, timestep = simulate[t](token, decide(obs))
      obs = timestep.obs
    return (token, obs), (
      timestep.reward,
      timestep.final_obs,
      timestep.env_failed,
    )

  return step


SKETCHES = {
  'one place': {},
  'pieces': {'pieces': 3},
  'two places in pieces': {
    'places': {'x': {'devices': [0]}, 'y': {'devices': [1]}},
    'stages': {'simulate': 'y', '*': 'x'},
    'pieces': 2,
  },
}


@pytest.mark.slow
@pytest.mark.parametrize(
  'sketch', claims.some([*SKETCHES], keep=['two places in pieces'])
)
def test_a_planned_step_equals_a_plain_loop(make, sketch):
  (pool, _), (other, _) = make(), make()
  begin = lambda pool: rollout.init(env_pool.from_pool(pool), np.arange(6))
  eager, state = workflow(pool), begin(pool)
  inputs = np.ones(6, np.float32), jax.random.key(0)
  flow = flow_lib.trace(workflow(other), state, *inputs)
  runtime = local.LocalRuntime(
    plan_lib.parse(SKETCHES[sketch], flow.stages), step=flow
  )
  in_memory.start(runtime, begin(other))
  for _ in range(4):
    result = runtime.step(*inputs)
    state, want = eager(state, *inputs)
    for x, y in zip(
      (result, in_memory.state(runtime)), (want, state), strict=True
    ):
      jax.tree.map(np.testing.assert_array_equal, tuple(x), tuple(y))
  assert int(state[0].token[0, 1]) == 20
  runtime.close()


def ppo(pools, num_envs=4):
  """A workflow that trains in one pool and is judged in the other."""
  env, eval_env = map(env_pool.from_pool, pools)
  workflow = workflows.embodied_ppo(
    env,
    gaussian_policy.policy,
    optimizers_lib.adamw(1e-3),
    num_envs=num_envs,
    num_steps=4,
    num_minibatches=1,
    num_epochs=1,
    eval_env=eval_env,
  )
  seeds = seed_source.seeds(held_out=num_envs, held_out_batch=num_envs)
  return workflow, seeds


@pytest.mark.slow
def test_a_run_measures_simulators_and_resets_them(make, tmp_path, monkeypatch):
  monkeypatch.setenv('RLINF_JAX_CACHE', str(tmp_path / 'cache'))
  monkeypatch.setattr(autoplan, 'SECONDS', 1.0)  # Any plan will do.

  def run(name, **kwargs):
    pools = [make(2, 1)[0] for _ in range(2)]
    folder = str(tmp_path / name)
    train.train(*ppo(pools, 2), workdir=folder, steps=3, **kwargs)
    assert not any(
      pool.failed_episodes or pool.restarted_episodes for pool in pools
    )
    return language_run_test.lines(tmp_path / name)

  found, wanted = run('auto'), run('none', plan=None)
  assert any((tmp_path / 'cache').iterdir())
  for got, want in zip(found, wanted, strict=True):
    assert got == pytest.approx(want, rel=1e-3, abs=1e-5)


@pytest.mark.slow
def test_a_resumed_run_continues_to_the_bit(make, tmp_path, capsys):
  """In the middle of its episodes: other processes bring them back."""

  def run(name, steps, **kwargs):
    pools = [make(4, 2, say=print)[0] for _ in range(2)]
    folder = tmp_path / name
    given = {'plan': {'pieces': 2}, 'checkpoint_every': 2} | kwargs
    given['evaluate_every'] = 2
    train.train(*ppo(pools), workdir=str(folder), steps=steps, **given)
    return folder, capsys.readouterr().out

  straight, output = run('straight', 4)
  assert RESTORED not in output
  saved.stopped_after(2, straight, tmp_path / 'broken')
  resumed, output = run('broken', 4, resume=True)
  assert output.count(RESTORED) == 2  # Of each piece.
  assert language_run_test.lines(resumed) == language_run_test.lines(straight)
  language_run_test.equal_states(
    language_run_test.state(resumed, 4), language_run_test.state(straight, 4)
  )


def test_a_chunk_ends_with_the_episode(make):
  pool, _ = make(3, 1, chunk=4, discount=0.5)
  token, _ = pool.init(np.arange(3))
  chunk = np.array(
    [[1, 2, 3, 4], [1, counting.WIN, 3, 4], [counting.RAISE, 1, 1, 1]],
    np.float32,
  )
  token, timestep = pool.step(token, chunk[..., None])
  np.testing.assert_array_equal(timestep.steps[:2], [4, 2])
  np.testing.assert_allclose(
    timestep.reward, [1 + 2 / 2 + 3 / 4 + 4 / 8, 1 + counting.WIN / 2, 0]
  )
  np.testing.assert_array_equal(timestep.terminated, [0, 1, 0])
  np.testing.assert_array_equal(timestep.action_reward[0], [1, 2, 3, 4])
  np.testing.assert_array_equal(timestep.action_reward[2], 0)
  np.testing.assert_array_equal(timestep.success, [0, 1, 0])
  np.testing.assert_array_equal(timestep.chunk_success, [0, 1, 0])
  np.testing.assert_array_equal(timestep.env_failed, [0, 0, 1])
  np.testing.assert_array_equal(timestep.obs[:, 1], [4, 0, 0])  # Time.
  np.testing.assert_array_equal(timestep.final_obs[:, 1], [4, 2, 0])
  token, timestep = pool.step(token, 0 * chunk[..., None])
  np.testing.assert_array_equal(timestep.truncated, [1, 0, 0])
  np.testing.assert_array_equal(timestep.steps, [env_toys.HORIZON - 4, 4, 4])
  # An episode of the Env is as many calls, the last of which is not whole.
  assert env_pool.from_pool(pool).horizon == -(-env_toys.HORIZON // 4) < 4


def test_a_token_is_used_in_order(make):
  pool, _ = make()
  token, _ = pool.init(np.arange(6))
  after, _ = counting.act(pool, token, *range(6))
  with pytest.raises(
    ValueError, match='0 was to make call 0, but is at 1: a token'
  ):
    counting.act(pool, token, *range(6))
  sent = pool.send(after[:3], np.zeros((3, 1)))
  time.sleep(0.3)  # They are done, and still not received.
  with pytest.raises(ValueError, match=r'\[2\] are stepping: call .recv'):
    pool.send(after[2:], np.zeros((4, 1)))
  pool.recv(sent)
  with pytest.raises(ValueError, match=r'6 environments must be \[6, 1\]'):
    pool.step(after, np.zeros((6, 2)))


def test_another_process_continues_from_a_snapshot(make):
  seed_B, action_TBA = np.arange(6), counting.actions(20, 6)
  pool, _ = make()
  token, _ = pool.init(seed_B)
  for action_BA in action_TBA[:10]:
    token, _ = pool.step(token, action_BA)
  past, there = pool.save(token), token
  other, messages = make(processes=3)
  token, after = other.load(there, past), there
  for action_BA in action_TBA[10:]:
    after, want = pool.step(after, action_BA)
    token, timestep = other.step(token, action_BA)
    for x, y in zip(timestep, want, strict=True):
      np.testing.assert_array_equal(x, y)
  assert not other.failed_episodes and messages[0].startswith(RESTORED)
  # And so does the one that made it, which has gone further since.
  token = pool.load(there, past)
  _, timestep = pool.step(token, action_TBA[10])
  assert pool.save(there).first_call.max() > 0
  _, want = other.step(other.load(there, past), action_TBA[10])
  for x, y in zip(timestep, want, strict=True):
    np.testing.assert_array_equal(x, y)


def test_loading_the_current_token_restores_nothing(make):
  pool, messages = make()
  token, _ = pool.init(np.arange(6))
  token, _ = counting.act(pool, token, *range(6))
  np.testing.assert_array_equal(pool.load(token, pool.save(token)), token)
  assert not messages


def test_an_episode_that_was_not_saved_is_started_anew_and_reported(make):
  pool, _ = make()
  token, _ = pool.init(np.arange(6))
  token, timestep = counting.act(pool, token, *range(6))
  past = pool.save(token)
  past.first_call[2] = episode_log.NEVER
  other, messages = make()
  token = other.load(token, past)
  assert messages[1] == 'Episodes started anew, as they were not saved: 1.'
  token, timestep = counting.act(other, token, *6 * [1])
  assert (
    timestep.env_failed.tolist()
    == timestep.truncated.tolist()
    == [0, 0, 1, 0, 0, 0]
  )
  assert other.restarted_episodes == other.failed_episodes == 1
  np.testing.assert_array_equal(timestep.final_obs[2], past.obs[2])
  token, timestep = counting.act(other, token, *6 * [1])
  assert not timestep.env_failed.any()


def test_an_episode_that_replays_differently_is_lost(make):
  pool, _ = make()
  token, _ = pool.init(np.arange(6))
  token, timestep = counting.act(pool, token, *range(6))
  past = pool.save(token)
  past.obs[4] += 1
  other, messages = make()
  token = other.load(token, past)
  assert (
    'Environment 4' in messages[0]
    and 'returned another observation' in messages[0]
  )
  token, timestep = counting.act(other, token, *6 * [1])
  assert timestep.env_failed.tolist() == [0, 0, 0, 0, 1, 0]
