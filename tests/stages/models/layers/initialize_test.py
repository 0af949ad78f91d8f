"""Random parameters of a model that is too large for one draw."""

import jax
import jax.numpy as jnp
import numpy as np

from stages.models.layers import initialize


def test_a_large_model_is_drawn_in_parts(monkeypatch):
  shapes = {
    name: jax.ShapeDtypeStruct(shape, jnp.float32)
    for name, shape in {
      'a_DF': (8, 9),
      'b_DF': (60, 4),
      'c_D': (30,),
      'd_DF': (10, 9),
    }.items()
  }
  draw = lambda: initialize.draw(shapes, jax.random.key(0), 1.0)
  whole = draw()
  monkeypatch.setattr(initialize, 'DRAWN', 160)
  largest = 0

  def normal(key, shape, *args, inner=jax.random.normal):
    nonlocal largest
    largest = max(largest, *shape)
    return inner(key, shape, *args)

  monkeypatch.setattr(jax.random, 'normal', normal)
  parts = draw()
  assert largest == 240  # One matrix has more numbers than a draw.
  assert jax.tree.map(jnp.shape, parts) == jax.tree.map(jnp.shape, whole)
  np.testing.assert_array_equal(parts['c_D'], 1.0)
  numbers = np.concatenate([parts[k].ravel() for k in ('a_DF', 'b_DF', 'd_DF')])
  assert len(np.unique(numbers)) == len(numbers)
  np.testing.assert_allclose(numbers.std(), 1.0, atol=0.15)
