"""Counts of how often products read an argument, and devices gather it."""

import jax
from jax import lax
import jax.numpy as jnp
import pytest

from planner.counting import count
from sharding import row_map

D, L, V = 8, 3, 16
WIDE = jax.ShapeDtypeStruct((L, D, D), jnp.float32)
TABLE = jax.ShapeDtypeStruct((V, D), jnp.float32)
X = jax.ShapeDtypeStruct((4, D), jnp.bfloat16)
TOKEN = jax.ShapeDtypeStruct((4,), jnp.int32)


def layers(x, w_LDD, remat=True):
  """Layers that compute in bfloat16 and read a matrix twice each."""

  def layer(x, w_DD):
    w_DD = w_DD.astype(x.dtype)
    return jnp.tanh(jnp.tanh(x @ w_DD) @ w_DD), None

  return lax.scan(jax.checkpoint(layer) if remat else layer, x, w_LDD)[0]


def reads(fn, *shapes):
  return [*count.work(fn, *shapes).reads.values()][: len(shapes)]


@pytest.mark.parametrize('remat', [False, True])
def test_layers_are_read_again_where_a_gradient_passes_them(remat):
  def loss(above, trained, frozen, x):
    x = layers(layers(layers(x, frozen), trained, remat), above, remat)
    return x.astype(jnp.float32).sum()

  # Layers above those with a gradient pass it on; those below are not reached.
  grad = jax.grad(loss, argnums=1)
  assert reads(grad, WIDE, WIDE, WIDE, X)[:3] == [2, 2, 1]
  assert reads(loss, WIDE, WIDE, WIDE, X)[:3] == [1, 1, 1]


def test_rows_are_looked_up_where_they_are_unless_devices_have_their_own():
  def look_up(table, token):
    return table[token]

  def mapped(table, token):
    return row_map.map_rows(
      lambda params, token: params['table_VD'][token],
      {'table_VD': table},
      token,
      dtype=jnp.float32,
    )

  assert reads(look_up, TABLE, TOKEN) == [0, 0]
  letters = [('V', 'D'), ('B',)]
  found = count.work(mapped, TABLE, TOKEN, letters=letters)
  assert found.reads[0] == 1


def test_products_outside_of_loops_read_an_array_once_for_all():
  def fn(w, x):
    return jnp.tanh(x @ w.astype(x.dtype)) @ w.astype(x.dtype)

  matrix = jax.ShapeDtypeStruct((D, D), jnp.float32)
  assert reads(fn, matrix, X) == [1, 1]


def test_a_loop_over_parts_reads_what_loops_in_it_read():
  def fn(frozen, trained, unused, x):
    def loss(trained, x):
      return layers(layers(x, frozen), trained).astype(jnp.float32).sum()

    def part(total, x):
      return total + jax.grad(loss)(trained, x), None

    del unused
    return lax.scan(part, jnp.zeros_like(trained), x[:, None])[0]

  # Four parts, each with all layers: frozen ones once, others twice.
  assert reads(fn, WIDE, WIDE, WIDE, X)[:3] == [4, 8, 0]


def test_branches_and_conditions_do_not_mix_up_what_is_read():
  def fn(other, w, x):
    def body(carry):
      i, x = carry
      return i + 1, lax.cond(i > 1, lambda x: x, lambda x: layers(x, w), x)

    def is_first(carry):
      return (carry[0] < 3) & (other.sum() > 0)

    return lax.while_loop(is_first, body, (0, x))

  assert reads(fn, WIDE, WIDE, X)[:2] == [0, 3]  # In each of three turns.
