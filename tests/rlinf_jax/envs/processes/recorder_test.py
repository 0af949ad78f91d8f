"""Simulators are filmed while they are judged, and nothing comes of it."""

import gymnasium as gym
import jax
import numpy as np
import pytest

import env_toys
from planner.ir import flow as flow_lib
from rlinf_jax.envs import env_pool, gymnasium
from stages import metrics
from stages.envs.rollouts import evaluate as evaluate_lib
from stages.envs.rollouts import video
from stages.models.control import gaussian_policy

TOY = 'env_toys:toys/Drawn-v0'
DRAWN = {'render_mode': 'rgb_array', 'disable_env_checker': True}
WIN = -11
SEEDS, OTHERS = np.arange(5, dtype=np.int32) + 40, np.arange(5) + 90
T = env_toys.HORIZON


@pytest.fixture
def make():
  """Makes pools of toys, with their messages, and closes them."""
  pools = []

  def make_pool(processes=2, **settings):
    messages = []
    settings = DRAWN | {'name': TOY, 'say': messages.append} | settings
    pools.append(env_pool.make_pool(gymnasium.make, 5, processes, **settings))
    return pools[-1], messages

  yield make_pool
  for pool in pools:
    pool.close()


def actions():
  """The second episode wins in its fourth step, all others end by time."""
  action_TBA = np.random.default_rng(0).uniform(-1, 1, (T, 5, 1))
  action_TBA[3, 1] = WIN
  return action_TBA.astype(np.float32)


def play(pool, seed_B, **films):
  """All time steps, and the next token."""
  token, _ = pool.init(seed_B, **films)
  timesteps = []
  for action_BA in actions():
    token, timestep = pool.step(token, action_BA)
    timesteps.append(timestep)
  return token, jax.tree.map(lambda *xs: np.stack(xs), *timesteps)


def times(every=1):
  end_K1 = np.array([T, 4, T])[:, None]
  return np.minimum(np.arange(-(-T // every) + 1)[None] * every, end_K1)


def bare(seed, b, time):
  """Pictures that a plain loop takes."""
  env = gym.make(TOY, **DRAWN)
  env.reset(seed=int(seed))
  frames = [env.render()]
  for action_A in actions()[: time[-1], b]:
    env.step(action_A)
    frames.append(env.render())
  return np.stack([frames[t] for t in time])


@pytest.mark.parametrize('processes, every', [(1, 1), (2, 3)])
def test_frames_are_those_of_a_plain_loop(make, processes, every):
  pool, messages = make(processes)
  token, _ = play(pool, SEEDS, rows=3, every=every)
  time = times(every)
  frame, shown_B = pool.frames(token[:3], time)
  for b in range(3):
    want = bare(SEEDS[b], b, time[b])
    np.testing.assert_array_equal(frame[b], want)
    assert len({x.tobytes() for x in want}) > 2
  assert shown_B.all() and not messages
  # Of another batch nothing is shown, and then the same seeds again.
  token, _ = play(pool, OTHERS, rows=3, every=every)
  assert not pool.frames(token[:3], time)[1].any()
  token, _ = play(pool, SEEDS, rows=3, every=every)
  np.testing.assert_array_equal(pool.frames(token[:3], time)[0], frame)


@pytest.mark.parametrize(
  'fails', ['', 'raise', 'kill', pytest.param('hang', marks=pytest.mark.slow)]
)
def test_a_rendering_failure_changes_nothing_else(make, fails):
  plain, _ = make()
  limit = {'step_timeout': 4.0} if fails == 'hang' else {}
  filmed, messages = make(fails=fails, **limit)
  _, want = play(plain, SEEDS)
  for again in range(2):
    token, got = play(filmed, SEEDS, rows=3, every=1)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    shown_B = filmed.frames(token[:3], times())[1]
    assert shown_B.all() == (not fails) and (
      not again or len(set(shown_B)) == 1
    )
  assert not filmed.failed_episodes and not filmed.failures
  no_video = [x for x in messages if 'no video' in x]
  assert len(no_video) == bool(fails)
  because = {
    'raise': 'the screen is black',
    'kill': 'was killed by SIGKILL',
    'hang': 'did not answer for 4 seconds',
  }
  assert not fails or because[fails] in no_video[0]


def test_episodes_of_another_process_have_no_video(make):
  """A pool that never began to film says so once, and shows nothing."""
  pool, messages = make()
  token, _ = play(pool, SEEDS)
  for _ in range(2):
    assert not pool.frames(token[:3], times())[1].any()
  (message,) = messages
  assert 'in another process' in message and 'one place' in message


def test_the_video_shows_the_episodes_that_are_scored(make):
  """And counts what it does where nothing is to be seen."""
  infos = []
  for settings in ({}, {'render_mode': None}):
    env = env_pool.from_pool(make(**settings)[0])
    policy = gaussian_policy.policy(env)
    evaluate = evaluate_lib.evaluator(policy, env)
    params = policy.init(jax.random.key(0))
    infos.append(evaluate(params, (), SEEDS, jax.random.key(1)))
  (numbers, rows), (unseen, nothing) = map(metrics.read, infos)
  assert numbers == unseen and not nothing
  shown = rows[video.NAME]
  assert shown['shown'].all()
  assert shown['seed'].tolist() == SEEDS[: video.EPISODES].tolist()
  # A picture tells whose and when it is.
  np.testing.assert_array_equal(
    shown['frame'][:, :, 0, 0, 0], np.tile(SEEDS[:4, None], (1, T + 1))
  )
  np.testing.assert_array_equal(shown['frame'][:, :, 0, 0, 1], shown['time'])


def test_simulators_of_several_tasks_are_scored_by_task(make):
  """By their tokens, which their steps use up."""
  env = env_pool.from_pool(make()[0])._replace(
    tasks=('even', 'odd'), task=lambda token_B3: token_B3[:, 0] % 2
  )
  policy = gaussian_policy.policy(env)
  evaluate = evaluate_lib.evaluator(policy, env)
  key = jax.random.key(0)
  params = jax.eval_shape(policy.init, key)
  carried = lambda params, *more: (params, evaluate(params, (), *more))
  flow = flow_lib.trace(carried, params, SEEDS, key)  # As a run records it.
  assert {'reset', 'score', 'video'} <= set(flow.stages)
  info = evaluate(policy.init(key), (), SEEDS, key)
  counts = [info[f'eval/{task}/success_once'].count for task in env.tasks]
  assert counts == [3, 2]


def test_large_frames_are_downsampled():
  frame = np.zeros((400, 602, 3), np.uint8)
  frame[:4, :4, 0] = 16
  frame[0, 0, 1] = 160
  small = gymnasium.downsample(frame)
  assert small.shape == (100, 150, 3) and small[0, 0].tolist() == [16, 10, 0]
