"""What is shown of an evaluation are the episodes that it judged."""

import contextlib

import jax
import numpy as np
import pytest

from planner.ir import flow as flow_lib
from planner.ir import plan as plan_lib
from rlinf_jax.runtime import local
from stages import metrics
from stages.envs import (
  action_chunks,
  demonstrations,
  drawing,
  push,
  reach,
  video,
)
from stages.envs import evaluate as evaluate_lib
from stages.models import gaussian_policy

SEEDS = np.array([9, 3, 7, 5, 1, 4], np.int32)
KEY = jax.random.key(2)


def judged(world, policy, params=()):
  """Numbers of an evaluation, and what is to be seen of it."""
  evaluate = evaluate_lib.evaluator(policy, world)
  info = jax.device_get(evaluate(params, (), SEEDS, KEY))
  numbers, rows = metrics.read(info)
  return numbers, rows.get(video.NAME)


def replay(seed, horizon, terminate):
  """All that happens on one table, by plain calls of what tables do."""
  key = jax.random.fold_in(jax.random.key(seed), 0)
  turn = jax.jit(lambda at: push.move(at, push.show_how(push.look(at))))
  at, solved = push.begin(key), []
  tables = [at]
  while len(solved) < horizon and not (terminate and any(solved)):
    at = turn(at)
    tables.append(at)
    solved.append(bool(np.linalg.norm(at.goal - at.puck) < push.NEAR))
  return tables, solved


@pytest.mark.parametrize('terminate', [False, True])
def test_frames_are_of_the_tables_that_were_judged(terminate):
  horizon, every = 32, 2  # 30 pictures, at most.
  world = push.push(horizon=horizon, terminate=terminate)
  policy = demonstrations.scripted_policy(world, push.show_how, 0.0)
  numbers, shown = judged(world, policy)
  np.testing.assert_array_equal(shown['seed'], SEEDS[: video.EPISODES])
  lengths = []
  picture = jax.jit(lambda at: drawing.picture(push.scene(at), drawing.SIZE))
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
      want = np.asarray(picture(tables[t]), int)
      # Places differ in their last bits, and edges of discs by a shade.
      assert np.abs(frame - want).max() <= 1
  assert shown['shown'].all()
  assert numbers['eval/episode_length'] == np.mean(lengths)
  assert any(lengths[i] < horizon for i in range(4)) == terminate


def test_being_seen_changes_no_bit_of_an_evaluation():
  world = reach.reach(horizon=20)
  policy = gaussian_policy.policy(world)
  params = policy.init(jax.random.key(0))
  seen, shown = judged(world, policy, params)
  unseen, nothing = judged(world._replace(render=None), policy, params)
  assert seen == unseen and shown is not None and nothing is None


def test_a_chunk_is_a_step_of_which_the_end_is_shown():
  world = push.push(horizon=12)
  policy = gaussian_policy.policy(action_chunks.chunked(world, 4, 0.9), chunk=4)
  params = policy.init(jax.random.key(0))
  _, shown = judged(action_chunks.chunked(world, 4, 0.9), policy, params)
  assert shown['time'].tolist() == video.EPISODES * [[0, 1, 2, 3]]
  moved = (shown['frame'][:, 1:] != shown['frame'][:, :-1]).any((2, 3, 4))
  assert moved.all()


@pytest.mark.parametrize('pieces', [1, 3])
def test_the_first_rows_are_shown_however_a_batch_is_cut(pieces):
  world = push.push(horizon=4)
  policy = gaussian_policy.policy(world)
  evaluate = evaluate_lib.evaluator(policy, world)

  def step(params, seed, key):
    return params, evaluate(params, (), seed, key)

  params = policy.init(jax.random.key(0))
  flow = flow_lib.trace(step, params, SEEDS, KEY)
  plan = plan_lib.parse({'pieces': pieces}, flow.stages)
  with contextlib.closing(local.LocalRuntime(plan, step=flow)) as runtime:
    runtime.load(params)
    info = jax.device_get(runtime.step(SEEDS, KEY))
  got, want = (
    metrics.read(info)[1][video.NAME],
    judged(world, policy, params)[1],
  )
  rows = min(video.EPISODES, len(SEEDS) // pieces)
  assert got['shown'].tolist() == rows * [1] + (video.EPISODES - rows) * [0]
  for name, x in want.items():
    np.testing.assert_array_equal(got[name][:rows], x[:rows])


def test_an_end_that_nobody_could_see_is_refused():
  world = push.push()

  def step(state, command):
    state, timestep = push.push().step(state, command)
    return state, timestep._replace(final_state=None)

  world = world._replace(step=step)
  policy = gaussian_policy.policy(world)
  with pytest.raises(ValueError, match='have no `final_state`'):
    judged(world, policy, policy.init(jax.random.key(0)))
