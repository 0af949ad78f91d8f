"""Worlds: episodes follow from seeds alone, and lose nothing as they end."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stages.envs import action_chunks, push, reach, seed_source

WORLDS = {'push': push.push, 'reach': reach.reach}
HORIZON = 5


@pytest.fixture(params=WORLDS)
def make(request):
  return WORLDS[request.param]


def seeds(n=8):
  return jnp.arange(n, dtype=jnp.int32) + 3


def commands(T=12, n=8, seed=0):
  rng = np.random.default_rng(seed)
  return rng.uniform(-1, 1, (T, n, 2)).astype(np.float32)


def acted(world, state, command_BA):
  """A step, as rollouts make it where nothing is to be drawn."""
  state, timestep = world.step(state, command_BA)
  return state, timestep._replace(final_state=None)


def play(world, seed_B, command_TBA):
  """All observations and timesteps, step by step."""
  state, obs = jax.jit(world.init)(seed_B)
  step, made = jax.jit(functools.partial(acted, world)), []
  for command_BA in command_TBA:
    state, timestep = step(state, command_BA)
    made.append(timestep)
  return obs, jax.tree.map(lambda *xs: np.stack(xs), *made)


@pytest.mark.parametrize('parts', [1, 2, 4])
def test_trajectories_are_the_same_however_rows_are_spread(make, parts):
  world, told = make(horizon=HORIZON), commands()
  obs, want = play(world, seeds(), told)
  for rows in np.split(np.arange(8), parts):
    first, got = play(world, seeds()[rows], told[:, rows])
    np.testing.assert_array_equal(first, obs[rows])
    jax.tree.map(
      np.testing.assert_array_equal,
      got,
      jax.tree.map(lambda x, rows=rows: x[:, rows], want),
    )


def test_a_seed_is_all_there_is_to_luck(make):
  world = make(horizon=HORIZON)
  _, same = world.init(jnp.array([7, 7], jnp.int32))
  _, other = world.init(jnp.array([8, 8], jnp.int32))
  np.testing.assert_array_equal(same[0], same[1])
  assert (np.asarray(same[0]) != np.asarray(other[0])).any()


def test_an_episode_ends_with_what_was_seen_last_and_begins_anew(make):
  world, long = make(horizon=HORIZON), make(horizon=100)
  _, short = play(world, seeds(), commands())
  _, endless = play(long, seeds(), commands())
  end = HORIZON - 1
  assert short.truncated[end].all() and not short.truncated[:end].any()
  # What came before the end, the end included, is as if there were none.
  np.testing.assert_array_equal(
    short.final_obs[: end + 1], endless.final_obs[: end + 1]
  )
  assert (short.obs[end] != short.final_obs[end]).any(-1).all()
  running = np.r_[0:end, end + 1 : 2 * HORIZON - 1]
  np.testing.assert_array_equal(short.obs[running], short.final_obs[running])
  # The second episode is another than the first.
  first = np.asarray(world.init(seeds())[1])
  assert (first != short.obs[end]).any(-1).all()


def test_an_endless_stream_of_episodes_never_repeats(make):
  _, timestep = play(make(horizon=2), seeds(2), commands(40, 2))
  begun = timestep.obs[1::2].reshape(-1, timestep.obs.shape[-1])
  assert len(np.unique(begun, axis=0)) == len(begun)


def test_success_terminates_where_it_is_asked_to():
  told = np.zeros((3, 1, 2), np.float32)
  for terminate in (False, True):
    world = push.push(terminate=terminate, dense=False)
    state, _ = world.init(seeds(1))
    at = state.place
    state = state._replace(place=at._replace(goal=at.puck + 0.01))
    _, timestep = world.step(state, told[0])
    assert timestep.success == timestep.reward == 1
    assert timestep.terminated == terminate and not timestep.truncated
    assert (timestep.obs != timestep.final_obs).any() == terminate


def test_success_at_the_last_step_is_terminated_and_not_truncated():
  world = push.push(terminate=True, horizon=1)
  state, _ = world.init(seeds(1))
  at = state.place
  state = state._replace(place=at._replace(goal=at.puck))
  _, timestep = world.step(state, np.zeros((1, 2), np.float32))
  assert timestep.terminated == 1 and timestep.truncated == 0


def test_a_chunk_is_its_steps_as_far_as_the_episode_goes(make):
  Z, discount = 3, 0.9
  told = commands(2 * Z)
  world = make(horizon=5)
  _, single = play(world, seeds(), told)
  chunk = action_chunks.chunked(world, Z, discount)
  assert chunk.horizon == 2
  in_chunks = np.moveaxis(told.reshape(2, Z, 8, 2), 1, 2)
  _, made = play(chunk, seeds(), in_chunks)
  np.testing.assert_array_equal(made.steps, [[3] * 8, [2] * 8])
  np.testing.assert_array_equal(made.truncated, [[0] * 8, [1] * 8])
  rewards = np.split(single.reward[:5], [3])
  for got, reward in zip(made.reward, rewards, strict=True):
    weight = discount ** np.arange(len(reward))
    np.testing.assert_allclose(got, weight @ reward, rtol=1e-5)
  np.testing.assert_allclose(
    made.final_obs[1], single.final_obs[4], rtol=1e-5, atol=1e-6
  )
  # The sixth command was not done: the second episode has not begun to move.
  np.testing.assert_allclose(made.obs[1], single.obs[4], rtol=1e-5, atol=1e-6)


def test_chunks_of_another_length_are_refused():
  world = action_chunks.chunked(push.push(), 3, 0.9)
  state, _ = world.init(seeds())
  with pytest.raises(ValueError, match='chunks of 3: give the policy'):
    world.step(state, np.zeros((8, 2, 2), np.float32))


def table(gripper, puck, goal=(0.5, 0.0)):
  return push.Table(*(jnp.array(x, jnp.float32) for x in (gripper, puck, goal)))


def test_the_puck_stays_until_it_is_touched():
  at = push.move(table((0.0, 0.0), (0.3, 0.0)), jnp.array([1.0, 0.0]))
  np.testing.assert_allclose(at.gripper, [push.SPEED, 0.0])
  np.testing.assert_array_equal(at.puck, jnp.array([0.3, 0.0]))


def test_a_puck_pushed_from_behind_goes_straight_on():
  at = table((-push.TOUCH, 0.0), (0.0, 0.0))
  for i in range(3):
    at = push.move(at, jnp.array([0.5, 0.0]))
    far = 0.5 * push.SPEED * (i + 1)
    np.testing.assert_allclose(at.puck, [far, 0.0], atol=1e-6)


def test_a_puck_pushed_off_its_middle_slips_to_the_side():
  at = push.move(table((-0.15, -0.05), (0.0, 0.0)), jnp.array([1.0, 0.0]))
  off = np.array(at.puck) - np.array(at.gripper)
  np.testing.assert_allclose(np.linalg.norm(off), push.TOUCH, rtol=1e-5)
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
  held = source.held_out()
  assert [x.shape for x in held] == [(3,), (3,)]
  assert len(set(np.concatenate(held).tolist())) == 6
  np.testing.assert_array_equal(held, source.held_out())
  with pytest.raises(ValueError, match='multiple of the other'):
    seed_source.seeds(held_out=5, held_out_batch=3)
