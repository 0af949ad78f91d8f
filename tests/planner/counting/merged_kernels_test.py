"""Kernels of several results, by hand."""

import jax
from jax import lax
import jax.numpy as jnp
import pytest

from planner.counting import count
from stages.language import language_model
from stages.models import lora, transformer

B, D = 64, 32
ITEM = 4  # Bytes of float32.


def bytes_alive(fn, platform):
  """Returns the peak of intermediate values of a function of two arrays."""
  like = jax.ShapeDtypeStruct((B, B), jnp.float32)
  small = jax.ShapeDtypeStruct((B, D), jnp.float32)
  return count.work(fn, like, small, platform=platform).bytes_alive


def gated(x, w):
  one, other = x @ x, x.T @ x
  return (one * other) @ w, (one + other) @ w


def test_a_gpu_makes_at_once_what_is_made_of_the_same_arrays():
  # Two products are read, and two more arrays are made of them. Elsewhere the
  # product of the first is computed before the second is made.
  assert bytes_alive(gated, 'gpu') == 4 * ITEM * B * B
  assert bytes_alive(gated, 'tpu') == 3 * ITEM * B * B


def test_an_array_that_waits_for_another_is_made_after_it():
  def chained(x, w):
    one, other = x @ x, x.T @ x
    product = (one * other) @ x
    return (one + product) @ w, other @ w

  assert bytes_alive(chained, 'gpu') == bytes_alive(chained, 'tpu')


def test_arrays_of_different_shapes_are_made_one_after_the_other():
  def cut(x, w):
    one, other = x @ x, x.T @ x
    return (one * other) @ w, (one + other)[: B // 2] @ w

  assert bytes_alive(cut, 'gpu') == bytes_alive(cut, 'tpu')


def test_a_gpu_adds_a_product_to_another_in_its_place():
  def beside(x, w):
    y = x @ x + x.T @ x
    one = jnp.tanh(y) @ x
    return (jnp.sin(y) @ one) @ w

  # Two products, or their sum; then `one`, and what it is multiplied by.
  assert bytes_alive(beside, 'gpu') == 3 * ITEM * B * B
  assert bytes_alive(beside, 'tpu') == 4 * ITEM * B * B

  def read_elsewhere(x, w):
    first = x @ x
    y = first + x.T @ x
    one = jnp.tanh(y) @ x
    return (jnp.sin(y) @ one) @ (first @ w)

  alive = bytes_alive(read_elsewhere, 'gpu')
  assert alive == bytes_alive(read_elsewhere, 'tpu')


def test_a_gpu_adds_an_adapter_to_its_weight_in_place():
  def merged(x, w):
    one, other = x + w @ w.T, x + w[::-1] @ w.T

    def turn(y, _):
      return one @ (other @ y), None

    return lax.scan(turn, w, None, length=3)[0].sum()

  # At the loop, two sums are there, and elsewhere also the two products.
  more = bytes_alive(merged, 'tpu') - bytes_alive(merged, 'gpu')
  assert more == 2 * ITEM * B * B


@pytest.mark.parametrize('platform', ['gpu', 'tpu'])
@pytest.mark.parametrize('expanded', [False, True])
def test_a_weight_is_rounded_as_its_adapter_is_added(platform, expanded):
  def act(weights, a, b):
    if expanded:  # As quantized weights are, layer by layer.
      expand = lambda w: w.astype(jnp.bfloat16) / 2
      weights = [lax.map(expand, w) for w in weights]

    def merged(w):
      return (w.astype(jnp.float32) + a @ b).astype(jnp.bfloat16)

    one, other = map(merged, weights)

    def turn(y, _):
      return one @ (other @ y), None

    y = jnp.zeros((B, 1), jnp.bfloat16)
    return lax.scan(turn, y, None, length=3)[0]

  kind = jnp.int8 if expanded else jnp.bfloat16
  weight = jax.ShapeDtypeStruct((B, B), kind)
  low = jax.ShapeDtypeStruct((B, D), jnp.float32)
  high = jax.ShapeDtypeStruct((D, B), jnp.float32)
  letters = [('D', 'F'), ('D', 'F'), ('D', ''), ('', 'F')]
  done = count.work(
    act, (weight, weight), low, high, letters=letters, platform=platform
  )
  # Two sums in bfloat16, and the product of the second in float32; that of the
  # second weight, expanded, before.
  sums = (2 + expanded) * 2 * B * B
  assert 0 <= done.bytes_alive - (sums + ITEM * B * B) <= 8 * B


@pytest.mark.parametrize('kernels', [2, 3])
def test_a_gpu_rounds_a_product_by_itself_for_three_kernels(kernels):
  functions = [jnp.tanh, jnp.sin, jnp.cos][:kernels]

  def run(x):
    wide = jnp.matmul(x, x, preferred_element_type=jnp.float32)
    narrow = wide.astype(x.dtype)
    return [f(narrow) @ x for f in functions]

  like = jax.ShapeDtypeStruct((B, B), jnp.bfloat16)
  alive = count.work(run, like, platform='gpu').bytes_alive
  # Two kernels read the product, and have a result each in half of its bytes.
  # Three read it rounded: it is there first, then one result replaces that.
  assert alive == {2: 2.0, 3: 1.5}[kernels] * ITEM * B * B


def test_the_adapter_of_the_largest_matrix_is_added_first():
  config = transformer.Config(
    V=32, D=32, L=2, H=2, K=1, W=16, F=256, dtype='bfloat16'
  )
  policy = lora.wrap(
    language_model.policy(config, response_length=4), lora.Lora(rank=2)
  )
  params = jax.eval_shape(policy.init, jax.random.key(0))
  eqns = jax.make_jaxpr(lora.merge)(params).eqns
  sizes = [
    eqn.outvars[0].aval.size
    for eqn in eqns
    if eqn.primitive.name == 'dot_general'
  ]
  assert len(sizes) == 7 and sizes == sorted(sizes, reverse=True)
