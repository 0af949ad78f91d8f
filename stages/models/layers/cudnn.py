"""cuDNN's attention, by `jax.nn`, in the layouts of this project.

It knows causal masks of equally many queries and keys, behind which there may
be padding. So tokens are moved before the padding, and completions get queries
for the keys of their prompts, too. Elsewhere than on a GPU, XLA computes the
same call, with all scores in memory: tests do so.
"""

import functools

import jax
import jax.numpy as jnp

from sharding import mesh as mesh_lib
from sharding import row_map

PLATFORM = 'gpu'
MULTIPLE = 8  # Of lengths: odd ones have no gradient.
WIDEST = 128  # Of a head, on all GPUs.


def obstacle(q_BTHW, k_BCKW, softcap: float | None) -> str | None:
  """Why cuDNN cannot compute attention of such queries and keys."""
  (_, T, _, W), C = q_BTHW.shape, k_BCKW.shape[1]
  if softcap is not None:
    return 'scores have a soft cap'
  if C > 2 * T:
    return 'most keys are those of prompts'
  if mesh_lib.platform() != PLATFORM:
    return None
  if q_BTHW.dtype != 'bfloat16':
    return f'it computes in {q_BTHW.dtype}, and cuDNN in bfloat16'
  if W > WIDEST or W % 8:
    return f'heads have width {W}, and not a multiple of 8 up to {WIDEST}'
  return None if is_here() else 'JAX finds no cuDNN on this machine'


@functools.cache
def is_here() -> bool:
  """Whether JAX can trace calls of cuDNN, for which it needs no GPU."""
  x_BTHW = jax.ShapeDtypeStruct((1, 8, 1, 8), jnp.bfloat16)
  call = functools.partial(jax.nn.dot_product_attention, implementation='cudnn')
  try:
    jax.eval_shape(call, x_BTHW, x_BTHW, x_BTHW)
  except RuntimeError:  # 'cuDNN not found.'
    return False
  return True


def attention(q_BTHW, k_BCKW, v_BCKW, is_key_BC, *, scale: float | None = None):
  """Causal attention, [B, T, H, W], computed by each device for its heads.

  The last of C keys is that of the last of T queries. A query attends to keys
  that are tokens, up to its own; the result is arbitrary where its own is not.

  Args:
    q_BTHW: queries.
    k_BCKW: keys.
    v_BCKW: values.
    is_key_BC: true on tokens, false on padding.
    scale: factor of the scores; 1/√W if None.
  """
  is_gpu = mesh_lib.platform() == PLATFORM
  local = functools.partial(
    _local, scale=scale, implementation='cudnn' if is_gpu else 'xla'
  )
  return row_map.map_heads(local, q_BTHW, k_BCKW, v_BCKW, is_key_BC)


def _local(q_BTHW, k_BCKW, v_BCKW, is_key_BC, *, scale, implementation):
  """Attention of a device's own rows and heads."""
  T, C = q_BTHW.shape[1], k_BCKW.shape[1]
  c = C + -C % MULTIPLE

  def pad(x):
    before = [(0, 0), (c - x.shape[1], 0)]
    return jnp.pad(x, before + [(0, 0)] * (x.ndim - 2))

  # Tokens first, in their order.
  order_Bc = jnp.argsort(~pad(is_key_BC), axis=1, stable=True)
  place_Bc = jnp.argsort(order_Bc, axis=1)
  # Of padding alone, one attends to itself: an empty softmax has no gradient.
  length_B = jnp.maximum(is_key_BC.sum(1, dtype=jnp.int32), 1)
  seen_BcHW = jax.nn.dot_product_attention(
    *(_permuted(pad(x), order_Bc, place_Bc) for x in (q_BTHW, k_BCKW, v_BCKW)),
    scale=scale,
    is_causal=True,
    query_seq_lengths=length_B,
    key_value_seq_lengths=length_B,
    implementation=implementation,
  )
  return _permuted(seen_BcHW, place_Bc, order_Bc)[:, c - T :]


@jax.custom_vjp
def _permuted(x_BCHW, order_BC, place_BC):
  """Positions in another order, of which `place_BC` is the inverse.

  The gradient is a permutation, too. That of a gather would be a scatter.
  """
  del place_BC
  return jnp.take_along_axis(x_BCHW, order_BC[:, :, None, None], axis=1)


_permuted.defvjp(
  lambda x, order, place: (_permuted(x, order, place), (order, place)),
  lambda saved, x_bar: (_permuted(x_bar, *saved[::-1]), None, None),
)
