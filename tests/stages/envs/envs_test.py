"""Environments: episodes follow from seeds alone, and end without loss."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stages.envs import action_chunks, drawing, push, reach, seed_source

ENVS = {'push': push.push, 'reach': reach.reach}
HORIZON = 5


@pytest.fixture(params=ENVS)
def make(request):
  return ENVS[request.param]


def seeds(n=8):
  return jnp.arange(n, dtype=jnp.int32) + 3


def random_actions(T=12, n=8, seed=0):
  rng = np.random.default_rng(seed)
  return rng.uniform(-1, 1, (T, n, 2)).astype(np.float32)


def step_without_state(env, state, action_BA):
  """A step, as rollouts take it where nothing is rendered."""
  state, timestep = env.step(state, action_BA)
  return state, timestep._replace(final_state=None)


def play(env, seed_B, action_TBA):
  """The first observation, and the stacked time steps."""
  state, obs = jax.jit(env.init)(seed_B)
  step, steps = jax.jit(functools.partial(step_without_state, env)), []
  for action_BA in action_TBA:
    state, timestep = step(state, action_BA)
    steps.append(timestep)
  return obs, jax.tree.map(lambda *xs: np.stack(xs), *steps)


@pytest.mark.parametrize('parts', [1, 2, 4])
def test_trajectories_do_not_depend_on_how_rows_are_cut(make, parts):
  env, actions = make(horizon=HORIZON), random_actions()
  obs, want = play(env, seeds(), actions)
  for rows in np.split(np.arange(8), parts):
    first, got = play(env, seeds()[rows], actions[:, rows])
    np.testing.assert_array_equal(first, obs[rows])
    jax.tree.map(
      np.testing.assert_array_equal,
      got,
      jax.tree.map(lambda x, rows=rows: x[:, rows], want),
    )


def test_equal_seeds_start_equal_episodes(make):
  env = make(horizon=HORIZON)
  _, same = env.init(jnp.array([7, 7], jnp.int32))
  _, other = env.init(jnp.array([8, 8], jnp.int32))
  np.testing.assert_array_equal(same[0], same[1])
  assert (np.asarray(same[0]) != np.asarray(other[0])).any()


def test_an_episode_keeps_its_final_observation_and_resets(make):
  env, long = make(horizon=HORIZON), make(horizon=100)
  _, short = play(env, seeds(), random_actions())
  _, endless = play(long, seeds(), random_actions())
  end = HORIZON - 1
  assert short.truncated[end].all() and not short.truncated[:end].any()
  # Up to and including the end, it equals an episode without an end.
  np.testing.assert_array_equal(
    short.final_obs[: end + 1], endless.final_obs[: end + 1]
  )
  assert (short.obs[end] != short.final_obs[end]).any(-1).all()
  running = np.r_[0:end, end + 1 : 2 * HORIZON - 1]
  np.testing.assert_array_equal(short.obs[running], short.final_obs[running])
  # The second episode differs from the first.
  first = np.asarray(env.init(seeds())[1])
  assert (first != short.obs[end]).any(-1).all()


def test_an_endless_stream_of_episodes_never_repeats(make):
  _, timestep = play(make(horizon=2), seeds(2), random_actions(40, 2))
  first_obs = timestep.obs[1::2].reshape(-1, timestep.obs.shape[-1])
  assert len(np.unique(first_obs, axis=0)) == len(first_obs)


def test_success_terminates_if_asked_to():
  actions = np.zeros((3, 1, 2), np.float32)
  for terminate in (False, True):
    env = push.push(terminate=terminate, dense=False)
    state, _ = env.init(seeds(1))
    at = state.task_state
    state = state._replace(task_state=at._replace(goal=at.puck + 0.01))
    _, timestep = env.step(state, actions[0])
    assert timestep.success == timestep.reward == 1
    assert timestep.terminated == terminate and not timestep.truncated
    assert (timestep.obs != timestep.final_obs).any() == terminate


def test_progress_adds_up_to_the_closeness_that_an_episode_gains():
  actions = random_actions(8)
  _, closeness = play(push.push(horizon=20), seeds(), actions)
  _, got = play(
    push.push(horizon=20, dense=False, progress=2.0), seeds(), actions
  )
  progress = (got.reward - got.success) / 2.0
  np.testing.assert_allclose(
    progress[1:].sum(0),
    closeness.reward[-1] - closeness.reward[0],
    atol=1e-5,
  )
  assert np.abs(progress).max() > 1e-3
  with pytest.raises(ValueError, match='dense already'):
    push.push(progress=1.0)


def test_success_at_the_last_step_is_terminated_and_not_truncated():
  env = push.push(terminate=True, horizon=1)
  state, _ = env.init(seeds(1))
  at = state.task_state
  state = state._replace(task_state=at._replace(goal=at.puck))
  _, timestep = env.step(state, np.zeros((1, 2), np.float32))
  assert timestep.terminated == 1 and timestep.truncated == 0


def test_a_chunk_is_its_steps_up_to_the_end_of_the_episode(make):
  Z, discount = 3, 0.9
  actions = random_actions(2 * Z)
  env = make(horizon=5)
  _, single = play(env, seeds(), actions)
  chunk = action_chunks.chunked(env, Z, discount)
  assert chunk.horizon == 2
  in_chunks = np.moveaxis(actions.reshape(2, Z, 8, 2), 1, 2)
  _, got = play(chunk, seeds(), in_chunks)
  np.testing.assert_array_equal(got.steps, [[3] * 8, [2] * 8])
  np.testing.assert_array_equal(got.truncated, [[0] * 8, [1] * 8])
  rewards = np.split(single.reward[:5], [3])
  for chunk_reward, reward in zip(got.reward, rewards, strict=True):
    weight = discount ** np.arange(len(reward))
    np.testing.assert_allclose(chunk_reward, weight @ reward, rtol=1e-5)
  of_actions = np.append(single.reward[:5], np.zeros((1, 8)), 0)
  np.testing.assert_allclose(
    np.moveaxis(got.action_reward, 1, 2).reshape(6, 8), of_actions, rtol=1e-5
  )
  np.testing.assert_allclose(
    got.final_obs[1], single.final_obs[4], rtol=1e-5, atol=1e-6
  )
  # The sixth action was dropped: the second episode is at its start.
  np.testing.assert_allclose(got.obs[1], single.obs[4], rtol=1e-5, atol=1e-6)


def test_an_image_is_traced_once_for_all_steps_of_a_chunk(monkeypatch):
  """Each step draws two: the last of an episode and the first of the next."""
  drawn, draw = [], drawing.image
  monkeypatch.setattr(
    drawing, 'image', lambda *args: drawn.append(1) or draw(*args)
  )
  env = action_chunks.chunked(push.push(image_size=8), 4, 0.9)
  state, _ = jax.eval_shape(env.init, seeds())
  jax.eval_shape(env.step, state, jax.ShapeDtypeStruct((8, 4, 2), float))
  assert len(drawn) == 1


def test_chunks_of_another_length_are_refused():
  env = action_chunks.chunked(push.push(), 3, 0.9)
  state, _ = env.init(seeds())
  with pytest.raises(ValueError, match='chunks of 3: give the policy'):
    env.step(state, np.zeros((8, 2, 2), np.float32))


def table(gripper, puck, goal=(0.5, 0.0)):
  return push.Table(*(jnp.array(x, jnp.float32) for x in (gripper, puck, goal)))


def test_the_puck_stays_until_it_is_touched():
  at = push.step(table((0.0, 0.0), (0.3, 0.0)), jnp.array([1.0, 0.0]))
  np.testing.assert_allclose(at.gripper, [push.SPEED, 0.0])
  np.testing.assert_array_equal(at.puck, jnp.array([0.3, 0.0]))


def test_a_puck_pushed_from_behind_goes_straight_on():
  at = table((-push.TOUCH, 0.0), (0.0, 0.0))
  for i in range(3):
    at = push.step(at, jnp.array([0.5, 0.0]))
    distance = 0.5 * push.SPEED * (i + 1)
    np.testing.assert_allclose(at.puck, [distance, 0.0], atol=1e-6)


def test_a_puck_pushed_off_its_middle_slips_to_the_side():
  at = push.step(table((-0.15, -0.05), (0.0, 0.0)), jnp.array([1.0, 0.0]))
  offset = np.array(at.puck) - np.array(at.gripper)
  np.testing.assert_allclose(np.linalg.norm(offset), push.TOUCH, rtol=1e-5)
  assert at.puck[0] > 0 and at.puck[1] > 0


def test_nothing_leaves_the_table():
  _, timestep = play(push.push(), seeds(), np.ones((60, 8, 2), np.float32))
  assert np.abs(timestep.obs[..., :4]).max() <= 1.0


def test_the_tip_of_a_straight_arm_is_its_length_away():
  np.testing.assert_allclose(reach.tip(jnp.zeros(2)), [1.0, 0.0], atol=1e-7)
  folded = reach.tip(jnp.array([0.5, jnp.pi]))
  np.testing.assert_allclose(folded, [0.0, 0.0], atol=1e-6)
  elbow = reach.tip(jnp.array([0.0, jnp.pi / 2]))
  np.testing.assert_allclose(elbow, [0.5, 0.5], atol=1e-6)


def test_held_out_seeds_are_the_same_for_every_run():
  source = seed_source.seeds(held_out=6, held_out_batch=3)
  batches = source.held_out()
  assert [x.shape for x in batches] == [(3,), (3,)]
  assert len(set(np.concatenate(batches).tolist())) == 6
  np.testing.assert_array_equal(batches, source.held_out())
  with pytest.raises(ValueError, match='a multiple of .held_out_batch'):
    seed_source.seeds(held_out=5, held_out_batch=3)
