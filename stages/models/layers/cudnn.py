"""cuDNN's attention, by `jax.nn`, in the layouts of this project.

cuDNN expects the padding of a row behind its tokens, so tokens are moved before
the padding. Its causal mask needs as many queries as keys. So where keys of a
prompt come before those of the queries, as in completions, zeros are added as
queries in front. Elsewhere than on a GPU, XLA computes the same call, with all
scores in memory: tests do so.
"""

import functools

import jax
import jax.numpy as jnp

from sharding import mesh as mesh_lib
from sharding import row_map

PLATFORM = 'gpu'
MULTIPLE = 8  # Lengths are padded to a multiple; odd ones have no gradient.
WIDEST = 128  # Largest width of a head that it computes on every GPU.


def obstacle(
  q_BTHW, k_BCKW, softcap: float | None, *, is_causal: bool
) -> str | None:
  """Why cuDNN cannot compute attention of such arrays; None if it can.

  The dtype and the width of heads matter on GPUs only.
  """
  (_, T, _, W), C = q_BTHW.shape, k_BCKW.shape[1]
  if softcap is not None:
    return 'scores have a soft cap'
  if is_causal and C > 2 * T:
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


def attention(
  q_BTHW,
  k_BCKW,
  v_BCKW,
  is_key_BC,
  *,
  is_causal: bool,
  scale: float | None = None,
):
  """Attention [B, T, H, W], computed by each device for its rows and heads.

  Args:
    q_BTHW: queries.
    k_BCKW: keys.
    v_BCKW: values.
    is_key_BC: true on tokens, false on padding. It may be None if attention is
      not causal and all keys are tokens.
    is_causal: if true, a query attends to the keys up to its own, where the
      last of C keys is that of the last of T queries, and its result is
      arbitrary if its own key is padding. If false, it attends to all keys.
    scale: factor of the scores; 1/√W if None.
  """
  is_gpu = mesh_lib.platform() == PLATFORM
  local = functools.partial(
    _causal if is_causal else _bidirectional,
    attend=functools.partial(
      jax.nn.dot_product_attention,
      scale=scale,
      is_causal=is_causal,
      implementation='cudnn' if is_gpu else 'xla',
    ),
  )
  return row_map.map_heads(local, q_BTHW, k_BCKW, v_BCKW, is_key_BC)


def _causal(q_BTHW, k_BCKW, v_BCKW, is_key_BC, *, attend):
  """Causal attention of a device's own rows and heads."""
  T, C = q_BTHW.shape[1], k_BCKW.shape[1]
  c = C + -C % MULTIPLE

  def pad(x):
    before = [(0, 0), (c - x.shape[1], 0)]
    return jnp.pad(x, before + [(0, 0)] * (x.ndim - 2))

  order_Bc, place_Bc, length_B = _tokens_first(pad(is_key_BC))
  seen_BcHW = attend(
    *(_permuted(pad(x), order_Bc, place_Bc) for x in (q_BTHW, k_BCKW, v_BCKW)),
    query_seq_lengths=length_B,
    key_value_seq_lengths=length_B,
  )
  return _permuted(seen_BcHW, place_Bc, order_Bc)[:, c - T :]


def _bidirectional(q_BTHW, k_BCKW, v_BCKW, is_key_BC, *, attend):
  """Attention of a device's own rows and heads to all keys that are tokens."""
  (B, T), C = q_BTHW.shape[:2], k_BCKW.shape[1]

  def pad(x):
    behind = [(0, 0), (0, -x.shape[1] % MULTIPLE)]
    return jnp.pad(x, behind + [(0, 0)] * (x.ndim - 2))

  q_BtHW, k_BcKW, v_BcKW = map(pad, (q_BTHW, k_BCKW, v_BCKW))
  if is_key_BC is not None:
    order_Bc, place_Bc, length_B = _tokens_first(pad(is_key_BC))
    k_BcKW = _permuted(k_BcKW, order_Bc, place_Bc)
    v_BcKW = _permuted(v_BcKW, order_Bc, place_Bc)
  elif T % MULTIPLE or C % MULTIPLE:
    length_B = jnp.full(B, C, jnp.int32)
  else:
    return attend(q_BtHW, k_BcKW, v_BcKW)
  seen_BtHW = attend(
    q_BtHW,
    k_BcKW,
    v_BcKW,
    query_seq_lengths=jnp.full(B, T, jnp.int32),
    key_value_seq_lengths=length_B,
  )
  return seen_BtHW[:, :T]


def _tokens_first(is_key_BC):
  """The order with tokens before padding, its inverse, and tokens per row.

  A row of padding alone has one token: an empty softmax has no gradient.
  """
  order_BC = jnp.argsort(~is_key_BC, axis=1, stable=True)
  place_BC = jnp.argsort(order_BC, axis=1)
  length_B = jnp.maximum(is_key_BC.sum(1, dtype=jnp.int32), 1)
  return order_BC, place_BC, length_B


@jax.custom_vjp
def _permuted(x_BCHW, order_BC, place_BC):
  """Position `order_BC[b, c]` of `x_BCHW` at c; `place_BC` is the inverse.

  The gradient is a permutation, too. That of a gather would be a scatter.
  """
  del place_BC
  return jnp.take_along_axis(x_BCHW, order_BC[:, :, None, None], axis=1)


_permuted.defvjp(
  lambda x, order, place: (_permuted(x, order, place), (order, place)),
  lambda saved, x_bar: (_permuted(x_bar, *saved[::-1]), None, None),
)
