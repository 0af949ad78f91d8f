"""The video of an evaluation shows the episodes that it scored."""

import contextlib

import jax
import numpy as np
import pytest

import in_memory
from planner.ir import flow as flow_lib
from planner.ir import plan as plan_lib
from rlinf_jax.runtime import local
from stages import metrics
from stages.envs import action_chunks, demonstrations, drawing, push, reach
from stages.envs.rollouts import evaluate as evaluate_lib
from stages.envs.rollouts import video
from stages.models.control import gaussian_policy

SEEDS = np.array([9, 3, 7, 5, 1, 4], np.int32)
KEY = jax.random.key(2)


def evaluated(env, policy, params=()):
  """The numbers and the video of an evaluation."""
  evaluate = evaluate_lib.evaluator(policy, env)
  info = jax.device_get(evaluate(params, (), SEEDS, KEY))
  numbers, rows = metrics.read(info)
  return numbers, rows.get(video.NAME)


def replay(seed, horizon, terminate):
  """All states of one environment, by plain calls of its functions."""
  key = jax.random.fold_in(jax.random.key(seed), 0)
  step = jax.jit(lambda at: push.step(at, push.controller(push.observe(at))))
  at, solved = push.reset(key), []
  tables = [at]
  while len(solved) < horizon and not (terminate and any(solved)):
    at = step(at)
    tables.append(at)
    solved.append(bool(np.linalg.norm(at.goal - at.puck) < push.NEAR))
  return tables, solved


@pytest.mark.parametrize('terminate', [False, True])
def test_frames_are_of_the_episodes_that_were_scored(terminate):
  horizon, every = 32, 2  # At most 30 frames.
  env = push.push(horizon=horizon, terminate=terminate)
  policy = demonstrations.scripted_policy(env, push.controller, 0.0)
  numbers, shown = evaluated(env, policy)
  np.testing.assert_array_equal(shown['seed'], SEEDS[: video.EPISODES])
  lengths = []
  image = jax.jit(lambda at: drawing.image(push.render(at), drawing.SIZE))
  for k, seed in enumerate(SEEDS):
    tables, solved = replay(seed, horizon, terminate)
    lengths.append(len(solved))
    if k >= video.EPISODES:
      continue
    times = [min(t, len(solved)) for t in range(0, horizon + 1, every)]
    assert shown['time'][k].tolist() == times
    assert shown['solved'][k] == any(solved)
    want = [float(t > 0 and solved[t - 1]) for t in times]
    assert shown['success'][k].tolist() == want
    for t, frame in zip(times, shown['frame'][k], strict=True):
      want = np.asarray(image(tables[t]), int)
      # Positions differ in their last bits, and edges of discs by one level.
      assert np.abs(frame - want).max() <= 1
  assert shown['shown'].all()
  assert numbers['eval/episode_length'] == np.mean(lengths)
  assert any(lengths[i] < horizon for i in range(4)) == terminate


def test_a_video_changes_no_bit_of_an_evaluation():
  env = reach.reach(horizon=20)
  policy = gaussian_policy.policy(env)
  params = policy.init(jax.random.key(0))
  with_video, shown = evaluated(env, policy, params)
  without, nothing = evaluated(env._replace(render=None), policy, params)
  assert with_video == without and shown is not None and nothing is None


def test_frames_are_taken_at_the_ends_of_chunks():
  env = push.push(horizon=12)
  policy = gaussian_policy.policy(action_chunks.chunked(env, 4, 0.9), chunk=4)
  params = policy.init(jax.random.key(0))
  _, shown = evaluated(action_chunks.chunked(env, 4, 0.9), policy, params)
  assert shown['time'].tolist() == video.EPISODES * [[0, 1, 2, 3]]
  moved = (shown['frame'][:, 1:] != shown['frame'][:, :-1]).any((2, 3, 4))
  assert moved.all()


@pytest.mark.parametrize('pieces', [1, 3])
def test_the_first_rows_are_shown_however_a_batch_is_cut(pieces):
  env = push.push(horizon=4)
  policy = gaussian_policy.policy(env)
  evaluate = evaluate_lib.evaluator(policy, env)

  def step(params, seed, key):
    return params, evaluate(params, (), seed, key)

  params = policy.init(jax.random.key(0))
  flow = flow_lib.trace(step, params, SEEDS, KEY)
  plan = plan_lib.parse({'pieces': pieces}, flow.stages)
  with contextlib.closing(local.LocalRuntime(plan, step=flow)) as runtime:
    in_memory.start(runtime, params)
    info = jax.device_get(runtime.step(SEEDS, KEY))
  got, want = (
    metrics.read(info)[1][video.NAME],
    evaluated(env, policy, params)[1],
  )
  rows = min(video.EPISODES, len(SEEDS) // pieces)
  assert got['shown'].tolist() == rows * [1] + (video.EPISODES - rows) * [0]
  for name, x in want.items():
    np.testing.assert_array_equal(got[name][:rows], x[:rows])


def test_time_steps_without_final_state_are_refused():
  env = push.push()

  def step(state, action):
    state, timestep = push.push().step(state, action)
    return state, timestep._replace(final_state=None)

  env = env._replace(step=step)
  policy = gaussian_policy.policy(env)
  with pytest.raises(ValueError, match='have no `final_state`'):
    evaluated(env, policy, policy.init(jax.random.key(0)))
