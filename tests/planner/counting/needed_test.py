"""Work that no result needs is not counted, as XLA does not do it."""

import functools

import jax
from jax import lax
import jax.numpy as jnp
import pytest

from planner.counting import count

SIDE = 16
W = jax.ShapeDtypeStruct((SIDE, SIDE), jnp.float32)
PRODUCT = 2 * SIDE**3


def test_a_product_that_no_result_needs_is_not_counted_in_a_loop():
  def turn(state):
    i, x = state
    y = x @ x
    _ = y @ y  # Its own loss, for example, in a backward pass.
    return i + 1, y

  def run(w):
    return lax.while_loop(lambda state: state[0] < 5, turn, (0, w))[1]

  assert count.work(run, W).matmul == {'float32': 5 * PRODUCT}


@jax.custom_vjp
def product(x, w):
  return x @ w


product.defvjp(
  lambda x, w: (x @ w, (x, w)),
  lambda factors, g: (g @ factors[1].T, factors[0].T @ g),
)


def test_gradients_of_frozen_weights_are_not_counted():
  """A derivative of one's own computes them, as in bfloat16, for no reader."""

  def loss(adapter, frozen, x):
    @jax.checkpoint
    def layer(x, of_layer):
      a, w = of_layer
      return product(x, w) + product(x, a), None

    return jnp.sum(lax.scan(layer, x, (adapter, frozen))[0])

  stack = jax.ShapeDtypeStruct((3, SIDE, SIDE), jnp.float32)
  done = count.work(jax.grad(loss), stack, stack, W)
  # Of each layer: two products forward, and backward one for the frozen weight
  # and two for the adapter.
  assert done.matmul == {'float32': 3 * 5 * PRODUCT}


def test_a_product_is_counted_whose_result_only_an_effect_needs():
  def run(w):
    jax.debug.callback(lambda x: None, w @ w)
    return w + 1.0

  assert count.work(run, W).matmul == {'float32': PRODUCT}


def test_a_sum_to_which_a_loop_adds_is_in_memory_once():
  def turn(state):
    i, total, w = state
    return i + 1, total + w @ w, w

  def run(w):
    state = lax.while_loop(
      lambda state: state[0] < 5, turn, (0, jnp.zeros_like(w), w)
    )
    return jnp.sum(state[1])

  # The sum, for which the loop takes over the zeros, and a product.
  assert count.work(run, W).bytes_alive == pytest.approx(
    2 * 4 * SIDE**2, abs=64
  )


def test_a_loop_does_not_collect_what_nothing_reads():
  """As keys and values are where only the last activations matter."""
  length, rows = 64, 1024

  def run(x, w, *, read):
    def turn(x, _):
      key = x @ w
      return jnp.tanh(key), (key, key * 2.0 @ w)

    x, (key, other) = lax.scan(turn, x, None, length=length)
    return (x, key) if read else x

  x = jax.ShapeDtypeStruct((rows, SIDE), jnp.float32)
  alone, both = (
    count.work(functools.partial(run, read=read), x, W)
    for read in (False, True)
  )
  one = 4 * rows * SIDE
  assert alone.matmul == both.matmul == {'float32': length * rows * SIDE**2 * 2}
  assert alone.bytes_alive < 4 * one
  assert both.bytes_out == one * (1 + length)
  # An output of a jitted function that its caller drops counts as dead too.
  inner = jax.jit(functools.partial(run, read=True))
  dropped = count.work(lambda x, w: inner(x, w)[0], x, W)
  assert dropped.bytes_alive == alone.bytes_alive
