"""Memory of devices that share parameters, by hand."""

import jax
from jax import lax
import jax.numpy as jnp
import pytest

from planner.counting import count
from stages.language import language_model
from stages.models import transformer
import tiny

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


@pytest.mark.parametrize(
  ('platform', 'dtype', 'tables'),
  [('gpu', 'float32', 1), ('tpu', 'float32', 2), ('tpu', 'bfloat16', 1)],
)
def test_a_tpu_gathers_a_table_in_the_type_of_products_and_copies_it(
  platform, dtype, tables
):
  """Gathered columns lie beside each other, and a look-up reads a row."""

  def score(embed, token, x):
    with jax.named_scope('map_rows'):
      rows = jnp.take(embed, token, axis=0, mode='clip')
    return rows.astype(dtype) @ x

  done = count.work(
    score,
    like(V, D),
    jax.ShapeDtypeStruct((B,), jnp.int32),
    jax.ShapeDtypeStruct((D, B), dtype),
    letters=[('V', 'D'), ('B',), ('', 'B')],
    platform=platform,
  )
  table, rows = ITEM * V * D, ITEM * B * D
  extra = done.bytes_gathered - tables * table
  assert 0 <= extra <= 2 * rows  # The rows that were looked up.
  assert done.bytes_alive <= 2 * rows  # One device has the parameter itself.


def test_a_tpu_copies_the_sum_of_rows_that_were_looked_up():
  def loss(embed, token):
    with jax.named_scope('map_rows'):
      rows = jnp.take(embed, token, axis=0, mode='clip')
    return jnp.sum(rows**2)

  def bytes_on(platform):
    done = count.work(
      jax.grad(loss),
      like(V, D),
      jax.ShapeDtypeStruct((B,), jnp.int32),
      letters=[('V', 'D'), ('B',)],
      platform=platform,
    )
    assert done.bytes_gathered == done.bytes_sharded
    return done.bytes_gathered

  # Columns of the scattered sum lie beside each other.
  assert bytes_on('tpu') - bytes_on('gpu') == ITEM * V * D


def test_a_tpu_copies_such_a_sum_in_each_turn_of_a_loop():
  """Packed rows are differentiated one after the other."""

  def loss(embed, token):
    with jax.named_scope('map_rows'):
      rows = jnp.take(embed, token, axis=0, mode='clip')
    return jnp.sum(rows**2)

  def total(embed, token_LB):
    def add(total, token_B):
      return total + jax.grad(loss)(embed, token_B), None

    return lax.scan(add, jnp.zeros_like(embed), token_LB)[0]

  def bytes_on(platform):
    done = count.work(
      total,
      like(V, D),
      jax.ShapeDtypeStruct((L, B), jnp.int32),
      letters=[('V', 'D'), ('', 'B')],
      platform=platform,
    )
    return done.bytes_gathered

  assert bytes_on('tpu') - bytes_on('gpu') == ITEM * V * D


def test_a_tpu_has_a_weight_in_the_type_of_products_once():
  def score(w, x):
    with jax.named_scope('map_rows'):
      return x @ w.astype(jnp.bfloat16)

  def bytes_on(platform):
    done = count.work(
      score,
      like(D, V),
      jax.ShapeDtypeStruct((B, D), jnp.bfloat16),
      letters=[('D', 'V'), ('B', 'D')],
      platform=platform,
    )
    return done.bytes_gathered

  narrow = 2 * D * V
  assert bytes_on('tpu') == narrow
  # It is converted to its own type after it is gathered, and back.
  assert bytes_on('gpu') == ITEM * D * V + narrow


def test_decoding_copies_the_layers_of_one_matrix_after_another():
  config = transformer.Config(
    V=32, D=32, L=16, H=2, K=1, W=16, F=256, dtype='bfloat16'
  )
  policy = language_model.policy(config, response_length=4)
  prompt = tiny.problem(2).prompt
  params = jax.eval_shape(policy.init, jax.random.key(0))
  keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 2))
  done = count.work(policy.act, params, prompt, keys)
  rounded = sum(2 * x.size for x in jax.tree.leaves(params))
  largest = 2 * config.L * config.D * config.F
  # Besides, there are caches, logits and the like.
  assert rounded < done.bytes_alive < rounded + 1.5 * largest < 2 * rounded


def test_a_barrier_copies_a_slice():
  def halves(x):
    y = jnp.sort(x)
    one, other = lax.optimization_barrier((y[: B // 2], y[B // 2 :]))
    return jnp.sort(one), jnp.sort(other)

  # All of it and its halves; half of them are results.
  assert count.work(halves, like(B, D)).bytes_alive == 2 * ITEM * B * D
