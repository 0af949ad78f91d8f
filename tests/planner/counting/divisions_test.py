"""Bytes of arrays that devices divide, and what these send."""

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import pytest

from planner.costs.mesh import layout
from planner.counting import count, divisions
from sharding import rules

LAYOUT = layout.Layout(rules.DEFAULT)
AXES = (('tensor', 4),)
B, S, D, F = 2, 8, 16, 32


def work(fn, letters, *shapes, axes=AXES):
  shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
  division = divisions.Division(axes, LAYOUT)
  return count.work(fn, *shapes, letters=letters, division=division)


def divide(x):
  return lax.with_sharding_constraint(x, P(None, 'tensor', None))


def whole(x):
  return lax.with_sharding_constraint(x, P(None, None, None))


def test_products_with_a_sharded_weight_are_divided():
  def fn(x_BSD, up_DF):
    return jnp.tanh(jnp.sort(x_BSD @ up_DF)).sum()

  # The product and what is sorted are there at once.
  done = work(fn, [('B', '', ''), ('D', 'F')], (B, S, D), (D, F))
  assert done.bytes_alive == 2 * 4 * B * S * F / 4
  assert done.matmul_flops == 2 * B * S * D * F


def test_sums_with_adapters_between_them_are_added_up_one_by_one():
  """No device has a part of an adapter's product, as all have its rank."""

  def adapted(x_BSF, y_BSF, down_FD, up_FD, low_BSI, b_ID):
    one = x_BSF @ down_FD + low_BSI @ b_ID
    return one + (y_BSF @ up_FD + low_BSI @ b_ID)

  letters = [('B', '', '')] * 2 + [('F', 'D')] * 2 + [('B', '', ''), ('I', 'D')]
  shapes = [(B, S, F)] * 2 + [(F, D)] * 2 + [(B, S, 1), (1, D)]
  size = 4 * B * S * D
  assert work(adapted, letters, *shapes).partial['F'] == (2, 2 * size, 0)


def test_a_weight_to_which_an_adapter_is_added_is_divided_as_before():
  def merged(x_BSF, down_FD, a_FI, b_ID):
    return x_BSF @ (down_FD + a_FI @ b_ID)

  letters = [('B', '', ''), ('F', 'D'), ('F', 'I'), ('I', 'D')]
  done = work(merged, letters, (B, S, F), (F, D), (F, 1), (1, D))
  assert done.partial['F'] == (1, 4 * B * S * D, 0)


def test_dimensions_that_a_mapped_constraint_leaves_open_stay_divided():
  """A policy's steps of denoising are mapped over an axis within an array.

  JAX then leaves open in the specification what its own list does not name.
  """

  def fn(x_BSD):
    spec = P(P.UNCONSTRAINED, None, P.UNCONSTRAINED)
    return lax.with_sharding_constraint(x_BSD, spec)

  division = divisions.Division(AXES, LAYOUT)
  with jax.sharding.use_abstract_mesh(
    jax.sharding.AbstractMesh((4,), AXES[0][:1])
  ):
    traced = jax.make_jaxpr(jax.vmap(fn, 1, 1))(jnp.zeros((B, 3, S, D)))
  (eqn,) = traced.eqns
  before = ((), (), (), ('tensor',))
  assert division.results(eqn, [before]) == [before]


def test_a_gather_and_a_scatter_send_half_of_what_adding_up_sends():
  size = 4 * B * S * D

  def added(x_BSF, down_FD):
    return whole(x_BSF @ down_FD)

  def scattered(x_BSF, down_FD):
    return divide(x_BSF @ down_FD)

  def gathered(x_BSF, down_FD):
    return whole(divide(x_BSF @ down_FD))

  letters, shapes = [('B', '', ''), ('F', 'D')], [(B, S, F), (F, D)]
  half = size / 2
  assert work(added, letters, *shapes).partial == {'F': (1, size, 0)}
  assert work(scattered, letters, *shapes).partial == {'F': (1, half, half)}
  assert work(gathered, letters, *shapes).partial == {'F': (2, size, half)}


def test_zeros_that_a_loop_adds_to_are_divided_as_what_is_added():
  def fn(x_BSD):
    def step(total, _):
      return total + jnp.sort(divide(x_BSD), 0), None

    return lax.scan(step, jnp.zeros(x_BSD.shape), None, length=3)[0].sum()

  given = fn, [('B', '', '')], (B, S, D)
  alone = work(*given, axes=(('tensor', 1),))
  assert work(*given).bytes_alive == alone.bytes_alive / 4


def test_the_gradient_of_a_look_up_is_divided_as_what_it_is_added_to():
  """It begins with zeros, of which nothing says how they are divided."""

  def fn(x_BD, w_DF, token_B):
    def loss(logit_BF):
      own = jnp.take_along_axis(logit_BF, token_B[:, None].astype(int), axis=1)
      return own.sum() + jnp.sum(logit_BF**2)

    return jnp.sum(jnp.sort(jax.grad(loss)(x_BD @ w_DF)))

  rows, logits = 64, 4 * 64 * F
  letters = [('B', ''), ('D', 'F'), ('B',)]
  alone, shared = (
    work(fn, letters, (rows, D), (D, F), (rows,), axes=axes).bytes_alive
    for axes in ((), AXES)
  )
  # A device has a quarter of all logits, and all that there is one of a row.
  assert alone > 2 * logits
  assert shared < alone / 4 + 4 * 4 * rows


def test_sums_of_gradients_are_divided_like_their_parameter():
  def fn(up_DF):
    return jnp.sort(jnp.zeros(up_DF.shape)).sum()

  assert work(fn, [('D', 'F')], (D, F)).bytes_alive <= 2 * 4 * D * F / 4


@pytest.mark.parametrize(
  'old, new, divided, expected',
  [
    ((8, 6), (8, 2, 3), ('', 't'), ('', 't', '')),
    ((8, 2, 3), (8, 6), ('', 't', ''), ('', 't')),
    ((4, 6), (1, 4, 6), ('t', ''), ('', 't', '')),
    ((1, 8, 3), (8, 3), ('', 't', ''), ('t', '')),
    ((2, 4, 3), (8, 3), ('', 't', ''), ('', '')),
    ((0, 4), (4, 0), ('', 't'), ('', '')),
  ],
)
def test_the_outermost_of_merged_or_split_dimensions_is_divided(
  old, new, divided, expected
):
  jaxpr = jax.make_jaxpr(lambda x: x.reshape(new))(jnp.zeros(old))
  axes = {'': (), 't': ('tensor',)}
  eqns = jaxpr.jaxpr.eqns
  one = divisions.Division((('tensor', 2),), LAYOUT)
  for eqn in eqns:
    (found,) = one.results(eqn, [tuple(axes[x] for x in divided)])
  assert found == tuple(axes[x] for x in expected)
