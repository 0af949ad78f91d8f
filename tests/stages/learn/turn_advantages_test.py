"""Advantages of turns: oracles by loops over lists, and laws."""

import itertools
import statistics

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stages.learn import advantages, turn_advantages

EXACT = {'rtol': 1e-9, 'atol': 1e-9}


@pytest.fixture(autouse=True)
def float64():
  with jax.enable_x64():
    yield


def group(seed, G=5, K=4):
  """Rewards, turns taken and states of random conversations."""
  rng = np.random.default_rng(seed)
  length_G = rng.integers(0, K + 1, G)
  taken = (np.arange(K) < length_G[:, None]).astype(float)
  reward = taken * rng.choice([0.0, 0.5, 1.0, rng.normal()], (G, K))
  state = np.where(taken > 0, rng.integers(0, 4, (G, K)), 0)
  state[:, 0] = 0
  return reward, taken, state


def discounted(reward_K, discount):
  return [
    sum(discount ** (j - k) * reward_K[j] for j in range(k, len(reward_K)))
    for k in range(len(reward_K))
  ]


def standardized(returns):
  """By entry: returns less their mean, over their deviation."""
  if len(returns) < 2 or max(returns) == min(returns):
    return [0.0] * len(returns)
  mean, deviation = statistics.mean(returns), statistics.stdev(returns)
  return [(x - mean) / (deviation + 1e-6) for x in returns]


def compared(reward, taken, discount, same):
  """Standardizes the turns taken of which `same` returns the same."""
  G, K = reward.shape
  return_ = [discounted(row.tolist(), discount) for row in reward]
  out = np.zeros((G, K))
  sets = {}
  for i, k in itertools.product(range(G), range(K)):
    if taken[i, k]:
      sets.setdefault(same(i, k), []).append((i, k))
  for members in sets.values():
    values = standardized([return_[i][k] for i, k in members])
    for (i, k), value in zip(members, values, strict=True):
      out[i, k] = value
  return out


@pytest.mark.parametrize('seed', range(20))
def test_by_turn_compares_turns_of_the_same_number(seed):
  reward, taken, state = group(seed)
  got = turn_advantages.by_turn(0.9)(reward, taken, state)
  want = compared(reward, taken, 0.9, lambda i, k: k)
  np.testing.assert_allclose(got, want, **EXACT)


@pytest.mark.parametrize('seed', range(20))
def test_by_state_adds_what_turns_in_equal_states_tell(seed):
  reward, taken, state = group(seed)
  got = turn_advantages.by_state(0.9, weight=0.5)(reward, taken, state)
  within = compared(reward, taken, 0.9, lambda i, k: int(state[i, k]))
  episode = standardized(reward.sum(1).tolist())
  want = taken * (np.array(episode)[:, None] + 0.5 * within)
  np.testing.assert_allclose(got, want, **EXACT)


def test_without_equal_states_gigpo_is_grpo():
  reward, _, _ = group(3)
  taken = np.ones_like(reward)
  state = np.arange(reward.size).reshape(reward.shape)
  got = turn_advantages.by_state()(reward, taken, state)
  want = advantages.group_relative(reward.sum(1))
  np.testing.assert_allclose(got, np.tile(want[:, None], 4), **EXACT)


def test_one_turn_has_the_advantage_of_its_conversation():
  reward = np.array([[0.0], [1.0], [1.0], [0.25]])
  taken, state = np.ones_like(reward), np.zeros_like(reward, int)
  got = turn_advantages.by_turn()(reward, taken, state)
  want = advantages.group_relative(reward[:, 0])
  np.testing.assert_allclose(got[:, 0], want, **EXACT)


def test_a_group_of_equal_returns_teaches_nothing():
  reward = np.array([[0.0, 0.1, 0.2], [0.1, 0.1, 0.1], [0.2, 0.1, 0.0]])
  taken, state = np.ones_like(reward), np.zeros_like(reward, int)
  for advantage in (turn_advantages.by_turn(), turn_advantages.by_state(1.0)):
    equal = advantage(np.tile(reward[:1], (3, 1)) * 0, taken, state)
    assert not np.asarray(equal).any()


def test_tokens_belong_to_turns_by_hand():
  mask = jnp.array([1.0, 1, 0, 0, 1, 0, 1, 1, 0, 0])
  turn = turn_advantages.turn_of_token(mask)
  assert turn.tolist() == [0, 0, 0, 0, 1, 1, 2, 2, 2, 2]
  reward, taken = turn_advantages.of_turns(
    jnp.array([0.5, 0.0, 1.0, 0.0]), 1.25, mask
  )
  assert reward.tolist() == [0.5, 0.0, 0.75, 0.0]  # A penalty of 1/4.
  assert taken.tolist() == [1, 1, 1, 0]
  on_last = turn_advantages.on_last_tokens(reward, mask)
  assert on_last.tolist() == [0, 0.5, 0, 0, 0, 0, 0, 0.75, 0, 0]


def test_a_row_without_tokens_has_no_turn():
  mask = jnp.zeros(4)
  reward, taken = turn_advantages.of_turns(jnp.ones(2), jnp.nan, mask)
  assert reward.tolist() == taken.tolist() == [0, 0]
