"""The ring buffer against a deque, and samples against their keys."""

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
  jax.ShapeDtypeStruct((2,), jnp.float32),
  *(jax.ShapeDtypeStruct((), jnp.float32),) * 2,
  {'state': jax.ShapeDtypeStruct((3,), jnp.float32)},
)
put = jax.jit(replay.put)


def rows(first, n) -> replay.Transition:
  """Transitions with their number in all fields."""
  id_N = np.arange(first, first + n, dtype=np.float32)
  wide = lambda many: np.repeat(id_N[:, None], many, 1)
  return replay.Transition(
    {'state': wide(3)}, wide(2), id_N, id_N, {'state': wide(3)}
  )


def ids(kept: replay.Replay):
  """Numbers of the rows held; all fields of a row agree."""
  columns = np.concatenate(
    [np.asarray(x).reshape(len(x), -1) for x in jax.tree.leaves(kept.rows)], 1
  )
  assert (columns == columns[:, :1]).all()
  return columns[: int(kept.filled), 0]


@pytest.mark.parametrize('capacity', [5, 8])
def test_the_newest_rows_are_kept_as_in_a_deque(capacity):
  rng = np.random.default_rng(capacity)
  ring, oracle = replay.empty(LIKE, capacity), collections.deque([], capacity)
  stored = 0
  for _ in range(40):
    kept = rng.integers(0, 2, 5).astype(np.float32)  # Rows that did not fail.
    new = rows(stored, 5)
    ring = put(ring, new, kept)
    oracle.extend(new.reward[kept > 0])
    stored += 5
    assert sorted(ids(ring)) == sorted(oracle)
    if len(oracle) == capacity:  # `next` is the oldest row.
      assert ring.rows.reward[ring.next] == oracle[0]


def test_more_rows_than_the_capacity_are_refused():
  with pytest.raises(ValueError, match='6 transitions at a time do not fit'):
    replay.put(replay.empty(LIKE, 5), rows(0, 6), np.ones(6))


def by_hand(key, i, count):
  """Row `i` of a sample, and its key."""
  key = jax.random.fold_in(jax.random.fold_in(key, core.REPLAY), i)
  at, row_key = jax.random.split(key)
  return int(jax.random.randint(at, (), 0, count)), jax.random.key_data(row_key)


def test_rows_are_drawn_by_their_own_keys_among_those_held():
  ring = put(replay.empty(LIKE, 64), rows(0, 10), np.ones(10))
  got = replay.draw(ring, (), KEY, 3, 4)
  want = [by_hand(KEY, i, 10) for i in range(12)]
  np.testing.assert_array_equal(got.row.reward, [at for at, _ in want])
  np.testing.assert_array_equal(
    jax.random.key_data(got.key), [key for _, key in want]
  )
  # A minibatch does not depend on how many follow it.
  fewer = replay.draw(ring, (), KEY, 2, 4)
  np.testing.assert_array_equal(got.row.reward[:8], fewer.row.reward)
  every = replay.draw(ring, (), KEY, 50, 4).row.reward
  assert {*np.asarray(every)} == {*range(10)}  # All of them, and no other.


def test_half_of_each_minibatch_is_drawn_from_offline_data():
  ring = put(replay.empty(LIKE, 64), rows(0, 10), np.ones(10))
  prior = jax.tree.map(jnp.asarray, rows(100, 7))
  got = np.asarray(replay.draw(ring, prior, KEY, 3, 4).row.reward)
  for i, row in enumerate(got.reshape(-1)):
    at = by_hand(KEY, i, 10 if i % 4 < 2 else 7)[0]
    assert row == (at if i % 4 < 2 else 100 + at)
  with pytest.raises(ValueError, match='3 rows has no halves'):
    replay.draw(ring, prior, KEY, 1, 3)


def changed(x: replay.Transition, obs) -> replay.Transition:
  return x._replace(obs=obs(x.obs), next_obs=obs(x.next_obs))


PICTURE = jax.ShapeDtypeStruct((2, 2, 3), jnp.uint8)
FLAT = changed(LIKE, lambda x: x['state'])
SEEN = changed(LIKE, lambda x: x | {'image': {'top': PICTURE}})


def write(path, like=FLAT):
  discount = np.array([1.0, 0.0, 1.0, 1.0], np.float32)
  got = rows(0, 4)._replace(discount=discount)
  if like is FLAT:
    got = changed(got, lambda x: x['state'])
  elif like is SEEN:
    image = np.arange(48, dtype=np.uint8).reshape(4, 2, 2, 3)
    got = changed(got, lambda x: x | {'image': {'top': image}})
  replay.write(path, got)
  return got


@pytest.mark.parametrize('like', [FLAT, LIKE, SEEN], ids=['flat', 'one', 'two'])
def test_transitions_are_read_as_they_were_written(tmp_path, like):
  path = tmp_path / 'demonstrations.npz'
  want = write(path, like)
  got = replay.read(path, like, 0.9)
  want = want._replace(discount=np.float32(0.9) * want.discount)
  jax.tree.map(np.testing.assert_array_equal, got, want)
  assert [x.name for x in tmp_path.iterdir()] == [path.name]


def test_transitions_of_another_environment_and_missing_ones_are_refused(
  tmp_path,
):
  with pytest.raises(FileNotFoundError, match='no transitions at'):
    replay.read(tmp_path / 'none.npz', FLAT, 0.9)
  path = tmp_path / 'demonstrations.npz'
  write(path)
  other = FLAT._replace(env_action=jax.ShapeDtypeStruct((7,), jnp.float32))
  message = (
    r'another environment: a row of env_action is \(2,\) there and .* \(7,\)'
  )
  with pytest.raises(ValueError, match=message):
    replay.read(path, other, 0.9)
  with pytest.raises(ValueError, match=r'a row of next_obs is \(3,\) there'):
    replay.read(path, LIKE, 0.9)
  cloned = tmp_path / 'cloned.npz'
  for obs in 'obs', 'obs/state':
    np.savez(cloned, **{obs: np.zeros((2, 3)), 'action': np.zeros((2, 2))})
    with pytest.raises(ValueError, match='holds demonstrations for cloning'):
      replay.read(cloned, LIKE, 0.9)
