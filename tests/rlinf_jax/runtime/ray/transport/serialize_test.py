import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlinf_jax.runtime.ray.transport import serialize

TYPES = (
  'bool int8 uint8 int16 int32 uint32 float16 float32 bfloat16 '
  'float8_e4m3fn float8_e5m2 complex64'
).split()
SHAPES = (), (0,), (3,), (2, 0, 4), (1, 7, 3)


def array(rng, shape, dtype):
  bits = rng.integers(0, 256, (*shape, jnp.dtype(dtype).itemsize), np.uint8)
  if dtype == 'bool':
    bits = bits % 2
  return bits.view(jnp.dtype(dtype)).reshape(shape)


@pytest.mark.parametrize('dtype', TYPES)
def test_every_type_arrives_as_it_was_sent(dtype):
  rng = np.random.default_rng(0)
  for shape in SHAPES:
    x = array(rng, shape, dtype)
    for sent in (x, jax.device_put(x)):
      received = pickle.loads(pickle.dumps(serialize.pack(sent), protocol=5))
      assert (
        received.data.dtype.kind != 'V'
      )  # Ray sends NumPy's own types without a copy.
      got = jnp.asarray(serialize.unpack(received))
      assert got.dtype == x.dtype and got.shape == shape
      assert np.asarray(got).tobytes() == x.tobytes()


@pytest.mark.parametrize('kind', ['threefry2x32', 'rbg'])
def test_keys_arrive_as_keys(kind):
  key_B = jax.random.split(jax.random.key(3, impl=kind), 4)
  got = serialize.unpack(serialize.pack(key_B))
  assert got.dtype == key_B.dtype and got.shape == (4,)
  np.testing.assert_array_equal(
    jax.random.key_data(got), jax.random.key_data(key_B)
  )
