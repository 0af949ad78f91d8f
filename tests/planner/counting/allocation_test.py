"""Memory of devices that share parameters, by hand."""

import jax
from jax import lax
import jax.numpy as jnp

from planner.counting import count

B, D, L, V = 4, 32, 3, 64
ITEM = 4  # Bytes of float32.


def like(*shape):
  return jax.ShapeDtypeStruct(shape, jnp.float32)


def test_parameters_are_whole_and_so_are_their_sums_where_rows_are_mapped():
  def loss(w, x):
    with jax.named_scope('map_rows'):
      return jnp.sum((x @ w) ** 2)

  done = count.work(
    jax.grad(loss), like(D, V), like(B, D), letters=[('D', 'V'), ('B', 'D')]
  )
  # The product and its slope are temporary. The sum of a device's own rows is
  # the result on one device, but not its part of the result on several, where
  # it is made of the slope.
  assert done.bytes_alive == 2 * ITEM * B * V
  assert done.bytes_gathered == ITEM * (B * V + D * V)
  assert done.bytes_sharded == done.bytes_gathered


def test_a_parameter_is_gathered_for_as_long_as_it_is_read():
  def score(w, x):
    with jax.named_scope('map_rows'):
      return x @ w

  done = count.work(
    score, like(D, V), like(B, D), letters=[('D', 'V'), ('B', 'D')]
  )
  assert done.bytes_alive == 0
  assert done.bytes_gathered == done.bytes_sharded == ITEM * D * V


def test_arrays_of_the_shape_of_stacked_layers_are_shared():
  def loss(ws, x):
    return jnp.sum(lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0])

  def norm(ws, x):
    return jnp.sum(jax.grad(loss)(ws, x) ** 2)

  done = count.work(
    norm, like(L, D, D), like(B, D), letters=[('', 'D', 'F'), ('B', 'D')]
  )
  assert done.bytes_gathered == done.bytes_alive
  stack, layer = ITEM * L * D * D, ITEM * D * D
  shared = done.bytes_gathered - done.bytes_sharded
  # A layer's own gradient remains, and what the loop stores for it.
  assert stack - layer <= shared <= stack
