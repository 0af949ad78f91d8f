"""Checksums of frozen parameters."""

import jax.numpy as jnp
import numpy as np
import pytest

from rlinf_jax.run import frozen_weights
from stages import base


def checksum(x):
  return frozen_weights.checksums({base.FROZEN: {'x': jnp.asarray(x)}})


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16', 'int8'])
def test_a_checksum_sees_every_change(dtype):
  # Powers of two have many bits in common.
  x = np.exp2(np.random.default_rng(0).integers(-3, 4, (24, 64)))
  x = jnp.asarray(x).astype(dtype)
  assert checksum(x) == checksum(x.copy())
  changed = [
    x.at[jnp.array([3, 19])].set(x[jnp.array([19, 3])]),  # Swapped rows.
    x[:, ::-1],
    x.at[5, 6].add(1),
    -x,
  ]
  sums = [checksum(y)["['frozen']['x']"] for y in (x, *changed)]
  assert len({*sums}) == len(sums)
