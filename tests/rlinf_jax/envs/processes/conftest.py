"""Pools of toy simulators, closed when a test ends."""

import pytest

from rlinf_jax.envs import env_pool, gymnasium
from tests.rlinf_jax.envs.processes import counting


@pytest.fixture
def make():
  """Makes pools of toys, with their messages, and closes them."""
  pools = []

  def make_pool(n=6, processes=2, **settings):
    messages = []
    settings = {
      'name': counting.TOY,
      'say': messages.append,
    } | settings
    pool = env_pool.make_pool(gymnasium.make, n, processes, **settings)
    pools.append(pool)
    return pool, messages

  yield make_pool
  for pool in pools:
    pool.close()
