"""Experts: their weights, and their layout."""

import jax
import jax.numpy as jnp
import numpy as np

from sharding import mesh as meshes
from sharding import rules
from stages.models import transformer
from stages.models.layers import mixture

CONFIG = transformer.Config(
  V=24,
  D=16,
  L=2,
  H=4,
  K=2,
  W=4,
  F=8,
  E=4,
  experts_per_token=2,
  qkv_bias=False,
  qk_norm=True,
  init_stddev=0.3,
)


def inputs(rows=4, columns=6):
  rng = np.random.default_rng(0)
  token = jnp.asarray(rng.integers(0, CONFIG.V, (rows, columns)))
  return token, jnp.asarray(rng.integers(0, 2, (rows, columns))).at[:, -1].set(
    1
  )


def test_the_weights_of_a_token_add_up_to_one_if_normalized():
  logit = jnp.asarray([[[0.0, 2.0, 1.0, -1.0]]])
  weight, routing = mixture.route(logit, 2, normalize=True)
  assert routing.expert.tolist() == [[[1, 2]]]
  share = 1 / (1 + np.exp(-1))
  np.testing.assert_allclose(weight, [[[share, 1 - share]]], rtol=1e-6)
  plain, _ = mixture.route(logit, 2, normalize=False)
  np.testing.assert_allclose(plain, jax.nn.softmax(logit)[..., 1:3], rtol=1e-6)


def test_experts_on_several_devices_give_the_same_logits_and_gradients():
  params = transformer.init_params(CONFIG, jax.random.key(0))
  token, mask = inputs()

  def loss(params):
    logit = transformer.Transformer(CONFIG).apply(
      {'params': params}, token, mask
    )
    return (jax.nn.log_softmax(logit)[..., 0] * mask).sum()

  want = jax.jit(jax.value_and_grad(loss))(params)
  mesh = meshes.mesh(jax.devices(), {'data': 2, 'expert': 4})
  with jax.set_mesh(mesh):
    placed = jax.device_put(params, rules.shardings(params, mesh))
    assert placed['layers']['up_EDF'].sharding.spec[1] == 'expert'
    got = jax.jit(jax.value_and_grad(loss))(placed)
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5),
    got,
    want,
  )
