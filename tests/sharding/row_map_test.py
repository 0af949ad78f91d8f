"""Functions of rows, with parameters gathered once."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from rlinf_jax.planning.compiled import communication, hlo
from sharding import mesh as mesh_lib
from sharding import row_map, rules

N, T, D, V = 8, 6, 16, 32
AXES = [{'fsdp': 4}, {'data': 2, 'fsdp': 2}, {'fsdp': 2, 'tensor': 2}]


def loss(params, x_NTD, chunks):
  """A sum over rows, in chunks of their second dimension."""

  def local(params, x_NTD):
    def of_chunk(x_NtD):
      x_NtD = x_NtD * params['scale_D'][None, None]
      return jnp.tanh(x_NtD @ params['head_DV']).sum((1, 2))

    chunk_CNtD = jnp.moveaxis(
      x_NTD.reshape(len(x_NTD), chunks, T // chunks, D), 1, 0
    )
    return jax.lax.map(jax.checkpoint(of_chunk), chunk_CNtD).sum(0)

  return row_map.map_rows(local, params, x_NTD, dtype=jnp.float32).sum()


def problem():
  rng = np.random.default_rng(0)
  draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
  return {'scale_D': draw(D), 'head_DV': draw(D, V)}, draw(N, T, D)


def compiled(axes, chunks, n=N):
  """The gradient on a mesh, and its arguments there."""
  params, x_NTD = problem()
  mesh = mesh_lib.mesh(jax.devices()[:4], axes)
  by_row = P(tuple(axis for axis in axes if axis != 'tensor'))
  layouts = (
    rules.shardings(params, mesh),
    jax.sharding.NamedSharding(mesh, by_row if n == N else P()),
  )
  args = jax.device_put((params, x_NTD[:n]), layouts)
  with jax.set_mesh(mesh):
    gradient = jax.jit(
      jax.grad(lambda params, x: loss(params, x, chunks)),
      out_shardings=layouts[0],
    )
    return gradient.lower(*args).compile(), args


@pytest.mark.parametrize('axes', AXES, ids=str)
def test_gradients_are_those_without_a_mesh(axes):
  run, args = compiled(axes, chunks=3)
  got = jax.device_get(run(*args))
  want = jax.grad(loss)(*problem(), 3)
  for name, x in got.items():
    np.testing.assert_allclose(x, want[name], rtol=2e-5, atol=2e-5)


def test_chunks_send_nothing_more():
  sent = {}
  for chunks in (1, 6):
    module = hlo.parse(compiled({'fsdp': 4}, chunks)[0].as_text())
    found = communication.collectives(module, (('fsdp', 4),))
    sent[chunks] = sum(one.bytes for one in found)
  assert 0 < sent[6] <= 1.01 * sent[1]


def test_rows_that_devices_cannot_share_are_left_to_the_compiler():
  run, args = compiled({'fsdp': 4}, chunks=2, n=6)
  params, x_NTD = problem()
  got = jax.device_get(run(*args))
  want = jax.grad(loss)(params, x_NTD[:6], 2)
  np.testing.assert_allclose(
    got['head_DV'], want['head_DV'], rtol=2e-5, atol=2e-5
  )


def test_parameters_travel_in_the_narrow_type_and_gradients_do_not():
  mesh = mesh_lib.mesh(jax.devices()[:4], {'fsdp': 4})
  params, x_NTD = problem()
  params['head_DV'] = params['head_DV'].astype(jnp.bfloat16).astype(jnp.float32)

  def loss(params, x_NTD):
    # Gradients of bfloat16 would round each of these sums.
    local = lambda params, x: (x @ params['head_DV']).sum((1, 2))
    return row_map.map_rows(local, params, x_NTD, dtype=jnp.bfloat16).sum()

  with jax.set_mesh(mesh):
    lowered = jax.jit(jax.value_and_grad(loss)).lower(params, x_NTD)
    _, got = lowered.compile()(params, x_NTD)
  assert 'stablehlo.all_gather' in lowered.as_text()
  assert f'tensor<{D}x{V}xbf16>' in lowered.as_text()
  want = x_NTD.sum((0, 1))[:, None].repeat(V, 1)
  np.testing.assert_allclose(got['head_DV'], want, rtol=1e-5, atol=1e-5)
