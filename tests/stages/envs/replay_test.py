"""A ring of transitions against a deque, and draws against their keys."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stages import core
from stages.envs import replay

KEY = jax.random.key(0)
LIKE = replay.Transition(
  {'state': jax.ShapeDtypeStruct((3,), jnp.float32)},
  *(jax.ShapeDtypeStruct((2,), jnp.float32),),
  *(jax.ShapeDtypeStruct((), jnp.float32),) * 2,
  {'state': jax.ShapeDtypeStruct((3,), jnp.float32)},
)
put = jax.jit(replay.put)


def rows(first, n) -> replay.Transition:
  """Transitions that are told apart by a number in all of their fields."""
  id_N = np.arange(first, first + n, dtype=np.float32)
  wide = lambda many: np.repeat(id_N[:, None], many, 1)
  return replay.Transition(
    {'state': wide(3)}, wide(2), id_N, id_N, {'state': wide(3)}
  )


def ids(kept: replay.Replay):
  """Those that are there; every field of a row has the same."""
  columns = np.concatenate(
    [np.asarray(x).reshape(len(x), -1) for x in jax.tree.leaves(kept.rows)], 1
  )
  assert (columns == columns[:, :1]).all()
  return columns[: int(kept.filled), 0]


@pytest.mark.parametrize('capacity', [5, 8])
def test_the_last_rows_are_kept_as_a_deque_keeps_them(capacity):
  rng = np.random.default_rng(capacity)
  ring, oracle = replay.empty(LIKE, capacity), collections.deque([], capacity)
  seen = 0
  for _ in range(40):
    kept = rng.integers(0, 2, 5).astype(np.float32)  # What was not lost.
    new = rows(seen, 5)
    ring = put(ring, new, kept)
    oracle.extend(new.reward[kept > 0])
    seen += 5
    assert sorted(ids(ring)) == sorted(oracle)
    if len(oracle) == capacity:  # The next to go is where the next is put.
      assert ring.rows.reward[ring.next] == oracle[0]


def test_more_than_there_is_room_for_is_refused():
  with pytest.raises(ValueError, match='6 transitions at a time do not fit'):
    replay.put(replay.empty(LIKE, 5), rows(0, 6), np.ones(6))


def by_hand(key, i, count):
  """What row `i` of a draw is, and its luck."""
  key = jax.random.fold_in(jax.random.fold_in(key, core.REPLAY), i)
  at, luck = jax.random.split(key)
  return int(jax.random.randint(at, (), 0, count)), jax.random.key_data(luck)


def test_rows_are_drawn_by_keys_of_their_own_among_those_that_are_there():
  ring = put(replay.empty(LIKE, 64), rows(0, 10), np.ones(10))
  made = replay.draw(ring, (), KEY, 3, 4)
  want = [by_hand(KEY, i, 10) for i in range(12)]
  np.testing.assert_array_equal(made.row.reward, [at for at, _ in want])
  np.testing.assert_array_equal(
    jax.random.key_data(made.key), [luck for _, luck in want]
  )
  # A minibatch is what it is, however many follow it.
  fewer = replay.draw(ring, (), KEY, 2, 4)
  np.testing.assert_array_equal(made.row.reward[:8], fewer.row.reward)
  every = replay.draw(ring, (), KEY, 50, 4).row.reward
  assert {*np.asarray(every)} == {*range(10)}  # Each of them, and no other.


def test_half_of_each_minibatch_is_drawn_from_what_others_did():
  ring = put(replay.empty(LIKE, 64), rows(0, 10), np.ones(10))
  prior = jax.tree.map(jnp.asarray, rows(100, 7))
  made = np.asarray(replay.draw(ring, prior, KEY, 3, 4).row.reward)
  for i, row in enumerate(made.reshape(-1)):
    at = by_hand(KEY, i, 10 if i % 4 < 2 else 7)[0]
    assert row == (at if i % 4 < 2 else 100 + at)
  with pytest.raises(ValueError, match='3 rows has no halves'):
    replay.draw(ring, prior, KEY, 1, 3)


FLAT = LIKE._replace(obs=LIKE.obs['state'], next_obs=LIKE.obs['state'])


def demonstrations(path):
  made = rows(0, 4)
  discount = np.array([1.0, 0.0, 1.0, 1.0], np.float32)
  made = made._replace(
    obs=made.obs['state'], next_obs=made.next_obs['state'], discount=discount
  )
  replay.write(path, made)
  return made


def test_demonstrations_are_read_as_they_were_written(tmp_path):
  path = tmp_path / 'demonstrations.npz'
  want = demonstrations(path)
  got = replay.read(path, FLAT, 0.9)
  want = want._replace(discount=np.float32(0.9) * want.discount)
  jax.tree.map(np.testing.assert_array_equal, got, want)
  assert [x.name for x in tmp_path.iterdir()] == [path.name]


def test_demonstrations_of_another_world_and_missing_ones_are_told(tmp_path):
  with pytest.raises(FileNotFoundError, match='no demonstrations at'):
    replay.read(tmp_path / 'none.npz', FLAT, 0.9)
  path = tmp_path / 'demonstrations.npz'
  demonstrations(path)
  other = FLAT._replace(env_action=jax.ShapeDtypeStruct((7,), jnp.float32))
  said = r'another world: a row of env_action is \(2,\) there and .* \(7,\)'
  with pytest.raises(ValueError, match=said):
    replay.read(path, other, 0.9)
  cloned = tmp_path / 'cloned.npz'
  np.savez(cloned, obs=np.zeros((2, 3)), action=np.zeros((2, 2)))
  with pytest.raises(ValueError, match='what was done, for a clone, and not'):
    replay.read(cloned, FLAT, 0.9)


def test_demonstrations_may_go_on_where_success_ended_them(tmp_path):
  path = tmp_path / 'demonstrations.npz'
  demonstrations(path)
  got = replay.read(path, FLAT, 0.9, always=True)
  np.testing.assert_array_equal(got.discount, np.full(4, np.float32(0.9)))
