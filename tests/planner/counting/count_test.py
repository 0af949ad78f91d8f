"""Work is what it is by hand, and what XLA says where XLA can count."""

import dataclasses
import functools

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

from planner.counting import count
from stages.models import transformer


def like(*shape, dtype=jnp.float32):
  return jax.ShapeDtypeStruct(shape, dtype)


def xla(fn, *args):
  """XLA's own counts of a program for this CPU."""
  compiled = jax.jit(fn).lower(*args).compile()
  return compiled.cost_analysis(), compiled.memory_analysis()


SIDE = like(16, 16)


def layer(x, w):
  return jnp.tanh(x @ w)


def stack(x, ws, unroll=1):
  return lax.scan(lambda x, w: (layer(x, w), None), x, ws, unroll=unroll)[0]


@pytest.mark.parametrize(
  'spec, shapes, flops',
  [
    ('ij,jk->ik', [(3, 5), (5, 7)], 2 * 3 * 5 * 7),
    ('bij,bjk->bik', [(2, 3, 5), (2, 5, 7)], 2 * 2 * 3 * 5 * 7),
    ('btd,dhw->bthw', [(2, 3, 8), (8, 4, 6)], 2 * 6 * 8 * 24),
    ('ij,ij->', [(3, 5), (3, 5)], 2 * 15),
  ],
)
def test_a_matmul_counts_two_operations_per_multiply_add(spec, shapes, flops):
  args = [like(*shape) for shape in shapes]
  done = count.work(functools.partial(jnp.einsum, spec), *args)
  assert done.matmul == {'float32': flops}
  assert done.bytes_in == 4 * sum(np.prod(shape) for shape in shapes)


def test_a_convolution_counts_as_a_matmul_at_every_position():
  def conv(x, kernel):
    return lax.conv(x, kernel, (1, 1), 'VALID')

  args = like(2, 3, 10, 10), like(5, 3, 3, 3)
  want = 2 * (2 * 5 * 8 * 8) * (3 * 3 * 3)
  assert count.work(conv, *args).matmul_flops == want
  assert xla(conv, *args)[0]['flops'] == pytest.approx(want, rel=0.01)


def test_matmuls_are_counted_by_type():
  x = like(4, 4, dtype=jnp.bfloat16)
  done = count.work(lambda x, y: (x @ x, y @ y), x, like(4, 4))
  assert done.matmul == {'bfloat16': 128, 'float32': 128}


def test_a_scan_counts_its_body_once_per_layer():
  one = count.work(layer, SIDE, SIDE)
  all_of_them = count.work(stack, SIDE, like(8, 16, 16))
  for field in ('flops', 'matmul_flops', 'bytes_moved', 'kernels'):
    assert getattr(all_of_them, field) == 8 * getattr(one, field), field
  # XLA counts a body once, which is why there is a count of our own.
  assert xla(stack, SIDE, like(8, 16, 16))[0]['flops'] < 2 * one.matmul_flops


@pytest.mark.parametrize('grad', [False, True])
def test_an_unrolled_stack_is_counted_as_xla_counts_it(grad):
  def fn(x, ws):
    for i in range(4):
      x = layer(x, ws[i])
    return x.sum()

  fn = jax.grad(fn, argnums=1) if grad else fn
  args = like(64, 128), like(4, 128, 128)
  done, (expected, _) = count.work(fn, *args), xla(fn, *args)
  assert done.flops == pytest.approx(expected['flops'], rel=0.03)
  assert done.bytes_moved == pytest.approx(expected['bytes accessed'], rel=0.5)


@pytest.mark.parametrize('wrap', [jax.jit, jax.checkpoint, lambda f: f])
def test_nested_calls_are_counted(wrap):
  assert count.work(wrap(layer), SIDE, SIDE) == count.work(layer, SIDE, SIDE)


def test_custom_derivatives_are_counted():
  @jax.custom_vjp
  def square(x):
    return x @ x

  square.defvjp(lambda x: (x @ x, x), lambda x, g: (g @ x.T + x.T @ g,))
  assert count.work(square, SIDE).matmul_flops == 2 * 16**3
  both = count.work(jax.value_and_grad(lambda x: square(x).sum()), SIDE)
  assert both.matmul_flops == 3 * 2 * 16**3


def test_rematerialization_is_counted():
  def loss(wrap, w, x):
    return wrap(layer)(wrap(layer)(x, w), w).sum()

  kept, again = (
    count.work(jax.grad(functools.partial(loss, wrap)), SIDE, SIDE)
    for wrap in (lambda f: f, jax.checkpoint)
  )
  assert again.matmul_flops > kept.matmul_flops


LOOPS = {
  'up to': (lambda t: t < 7, lambda t: t + 1, 0, 7),
  'and at': (lambda t: t <= 7, lambda t: t + 1, 0, 8),
  'from': (lambda t: t < 7, lambda t: t + 1, 3, 4),
  'in twos': (lambda t: t < 7, lambda t: 2 + t, 0, 4),
  'down': (lambda t: t > 0, lambda t: t - 1, 7, 7),
  'swapped': (lambda t: 7 > t, lambda t: t + 1, 0, 7),
  'never': (lambda t: t < 0, lambda t: t + 1, 0, 0),
}


@pytest.mark.parametrize('name', LOOPS)
def test_a_while_loop_counts_the_iterations_of_its_counter(name):
  test, step, start, turns = LOOPS[name]

  def fn(x):
    return lax.while_loop(
      lambda c: test(c[0]) & (c[1][0, 0] < 1e9),
      lambda c: (step(c[0]), c[1] @ c[1]),
      (jnp.asarray(start, jnp.int32), x),
    )[1]

  done = count.work(fn, SIDE)
  assert done.matmul_flops == turns * 2 * 16**3
  assert done.turns == turns  # There may be fewer.


@pytest.mark.parametrize('stride, kernel', [(1, 3), (2, 2), (4, 8)])
def test_both_gradients_of_a_convolution_cost_as_much_as_it_does(
  stride, kernel
):
  """Zeros between the numbers of a strided one's gradient are no work."""

  def conv(k, x):
    return lax.conv_general_dilated(x, k, (stride, stride), 'VALID')

  size = kernel + 15 * stride  # Windows fit without a rest.
  args = like(16, 8, kernel, kernel), like(4, 8, size, size)
  forward = count.work(conv, *args).matmul_flops
  both = jax.grad(lambda k, x: (conv(k, x) ** 2).sum(), (0, 1))
  # The gradient of the picture has windows at its edges, too.
  edges = (size / (16 * stride)) ** 2
  want = forward * (2 + edges)
  assert count.work(both, *args).matmul_flops == pytest.approx(want, rel=0.01)


def test_a_branch_needs_the_memory_of_the_largest_and_the_work_of_the_longest():
  def large(x):
    return jnp.sort(jnp.sort(x[:, None] * x[None], axis=0), axis=1)[0]

  def long(x):
    y = jnp.outer(x[:16], x[:16])
    return x + lax.fori_loop(0, 400_000, lambda _, y: y @ y, y)[0, 0]

  def either(p, x):
    return lax.cond(p, large, long, x)

  x = like(256)
  found = count.work(either, like(dtype=bool), x)
  assert found.flops >= count.work(long, x).flops > count.work(large, x).flops
  least = count.work(large, x).bytes_alive
  assert found.bytes_alive >= least > 2 * count.work(long, x).bytes_alive


def test_only_a_loop_with_another_condition_may_end_early():
  def fn(x):
    return lax.fori_loop(0, 7, lambda _, x: x @ x, x)

  def inside(x):
    return lax.scan(lambda x, _: (early(x), None), fn(x), None, 3)[0]

  def early(x):
    return lax.while_loop(
      lambda c: (c[0] < 5) & (c[1].sum() > 0),
      lambda c: (c[0] + 1, c[1] @ c[1]),
      (0, x),
    )[1]

  assert count.work(fn, SIDE).turns == 0
  done = count.work(inside, SIDE)
  assert done.turns == 5 and done.matmul_flops == (7 + 3 * 5) * 2 * 16**3


def test_a_loop_without_a_counter_needs_a_given_trip_count():
  def fn(x):
    return lax.while_loop(lambda x: x[0, 0] < 1, lambda x: x @ x, x)

  with pytest.raises(ValueError, match='maximum trip count .* is not visible'):
    count.work(fn, SIDE)
  assert count.work(fn, SIDE, trips=5).matmul_flops == 5 * 2 * 16**3


@pytest.mark.parametrize('step', [-1, 0])
def test_a_counter_that_never_reaches_its_limit_is_no_bound(step):
  def fn(x):
    return lax.while_loop(
      lambda c: c[0] < 7, lambda c: (c[0] + step, c[1] @ c[1]), (0, x)
    )[1]

  with pytest.raises(ValueError, match='is not visible'):
    count.work(fn, SIDE)


def test_the_most_expensive_branch_counts():
  def fn(p, x):
    return lax.cond(p, lambda x: x @ x @ x, lambda x: x, x)

  done = count.work(fn, like(dtype=jnp.bool_), SIDE)
  assert done.matmul_flops == 2 * 2 * 16**3


def test_fused_elementwise_operations_read_and_write_once():
  x = like(1000)

  def chain(x):
    return jnp.sin(x) * 2 + jnp.exp(x)

  assert count.work(chain, x).bytes_moved == 8000
  assert count.work(lambda x: chain(x).sum(), x).bytes_moved == 4004
  assert count.work(lambda x: x.reshape(10, 100).T, x).bytes_moved == 8000
  assert count.work(lambda x: x, x).bytes_moved == 0


def test_an_updated_row_is_written_in_place():
  def put(x, row):
    return lax.fori_loop(
      0, 10, lambda i, x: lax.dynamic_update_slice(x, row, (i, 0)), x + 1
    )

  done = count.work(put, like(1000, 8), like(1, 8))
  assert done.bytes_moved < 3 * 4 * 8000


def test_a_part_of_an_argument_is_copied_for_a_loop():
  def fn(ws, x):
    w = ws[0]
    return lax.fori_loop(0, 3, lambda _, x: layer(x, w), x)

  done = count.work(fn, like(4, 16, 16), SIDE)
  assert done.bytes_alive >= 4 * 16 * 16


def test_values_kept_for_the_backward_pass_count_as_alive():
  def loss(ws, x, wrap=lambda f: f):
    body = wrap(lambda x, w: (layer(layer(x, w), w), None))
    return lax.scan(body, x, ws)[0].sum()

  args = like(32, 64, 64), like(256, 64)
  kept = count.work(jax.grad(loss), *args).bytes_alive
  less = count.work(
    jax.grad(functools.partial(loss, wrap=jax.checkpoint)), *args
  ).bytes_alive
  assert less < 0.6 * kept
  expected = xla(jax.grad(loss), *args)[1].temp_size_in_bytes
  assert kept == pytest.approx(expected, rel=0.5)


CONFIG = transformer.Config(V=64, D=64, L=3, H=4, K=2, W=16, F=128)


def forward(params, token, mask, config=CONFIG):
  return transformer.Transformer(config).apply({'params': params}, token, mask)


def test_a_gradient_counts_three_forward_passes():
  token = like(4, 32, dtype=jnp.int32)
  params = transformer.param_shapes(CONFIG)
  once = count.work(forward, params, token, token)
  grad = jax.grad(lambda *args: forward(*args).sum())
  done = count.work(grad, params, token, token)
  assert done.matmul_flops == pytest.approx(3 * once.matmul_flops, rel=0.05)

  tokens, D, F, W = 4 * 32, CONFIG.D, CONFIG.F, CONFIG.W
  weights = D * W * (2 * CONFIG.H + 2 * CONFIG.K) + 3 * D * F
  attention = 2 * CONFIG.H * W * 32
  by_hand = tokens * (CONFIG.L * (weights + attention) + D * CONFIG.V) * 2
  assert once.matmul_flops == by_hand


def test_experts_count_by_the_rows_that_each_token_uses():
  x, weight, sizes = like(12, 5), like(3, 5, 7), like(3, dtype=jnp.int32)
  once = count.work(lax.ragged_dot, x, weight, sizes)
  assert once.matmul_flops == 2 * 12 * 5 * 7

  def loss(x, weight, sizes):
    return lax.ragged_dot(x, weight, sizes).sum()

  done = count.work(jax.grad(loss, (0, 1)), x, weight, sizes)
  # Both gradients; nothing needs the value.
  assert done.matmul_flops == pytest.approx(2 * once.matmul_flops)


def test_what_a_fused_operand_is_made_of_is_gone_during_its_product():
  def fn(x_BD, gate_DF, up_DF, down_FD, w_DD):
    return (((x_BD @ gate_DF) * (x_BD @ up_DF)) @ down_FD) @ w_DD

  shapes = like(4, 8), like(8, 16), like(8, 16), like(16, 200), like(200, 8)
  inner, outer = 4 * 4 * 16, 4 * 4 * 200
  # The product of two, and of that the next; not all four at once.
  assert count.work(fn, *shapes).bytes_alive == inner + outer
  shapes = *shapes[:3], like(16, 4), like(4, 8)
  assert count.work(fn, *shapes).bytes_alive == 3 * inner


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_partial_sums_of_a_layer_are_two_forwards_and_two_backwards(dtype):
  """In bfloat16, the forward pass stores rounded weights for the backward."""
  run = functools.partial(
    forward, config=dataclasses.replace(CONFIG, dtype=dtype)
  )
  token = like(4, 32, dtype=jnp.int32)
  params = transformer.param_shapes(CONFIG)
  paths = jax.tree_util.tree_flatten_with_path(params)[0]
  letters = [
    ('',) * ('layers' in str(path)) + tuple(path[-1].key.rpartition('_')[2])
    for path, _ in paths
  ] + [('', ''), ('', '')]

  def counted(fn):
    done = count.work(fn, params, token, token, letters=letters)
    return sum(done.partial.get(x, (0,))[0] for x in 'HKF')

  assert counted(run) == 2 * CONFIG.L
  grad = jax.grad(lambda *args: run(*args).sum())
  assert counted(grad) == 4 * CONFIG.L
