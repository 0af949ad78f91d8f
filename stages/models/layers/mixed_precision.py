"""Arithmetic of a model whose activations are narrower than its parameters.

Activations and factors of matrix products are bfloat16, say. Sums over tokens,
features or the vocabulary are float32. The gradient of a parameter that each
token uses is a sum over tokens: such a parameter is used in float32, and the
result is rounded.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp


def wide_dtype(dtype):
  """The dtype of sums over many numbers: `dtype`, or float32 if narrower."""
  return jnp.promote_types(dtype, jnp.float32)


def rms_norm(x, scale, norm_epsilon):
  """RMSNorm over the last dimension, arXiv:1910.07467, in float32 or wider.

  The result has the dtype of `x`. The gradient of the scale is a sum over all
  tokens, so the scale is used in float32 and the product is rounded.
  """
  if x.dtype == wide_dtype(x.dtype):
    return _rms_norm(x, scale, norm_epsilon)
  # Recompute in the backward pass: otherwise it keeps float32 activations.
  norm = jax.checkpoint(_rms_norm, prevent_cse=False, static_argnums=2)
  return norm(x, scale, norm_epsilon)


def _rms_norm(x, scale, norm_epsilon):
  wide = wide_dtype(x.dtype)
  wide_x = x.astype(wide)
  mean = jnp.mean(wide_x * wide_x, -1, keepdims=True)
  normal = wide_x * jax.lax.rsqrt(mean + norm_epsilon)
  scale = jnp.expand_dims(scale, range(x.ndim - 1)).astype(wide)
  return (normal * scale).astype(x.dtype)


def layer_norm(x, scale, bias, norm_epsilon):
  """LayerNorm over the last dimension, arXiv:1607.06450, in float32 or wider.

  The result has the dtype of `x`; for the rest, as `rms_norm`.
  """
  if x.dtype == wide_dtype(x.dtype):
    return _layer_norm(x, scale, bias, norm_epsilon)
  norm = jax.checkpoint(_layer_norm, prevent_cse=False, static_argnums=3)
  return norm(x, scale, bias, norm_epsilon)


def _layer_norm(x, scale, bias, norm_epsilon):
  wide = wide_dtype(x.dtype)
  wide_x = x.astype(wide)
  wide_x -= jnp.mean(wide_x, -1, keepdims=True)
  variance = jnp.mean(wide_x * wide_x, -1, keepdims=True)
  normal = wide_x * jax.lax.rsqrt(variance + norm_epsilon)
  scale, bias = (
    jnp.expand_dims(y, range(x.ndim - 1)).astype(wide) for y in (scale, bias)
  )
  return (normal * scale + bias).astype(x.dtype)


def gelu(x):
  """The exact GELU, x Φ(x), arXiv:1606.08415, in float32 or wider.

  Φ is the distribution of a normal number. The result has the dtype of `x`.
  """
  # By erf, as in torch. On GPUs, XLA computes erfc in two kernels.
  return _rounded_once(
    lambda x: x * (0.5 * (1.0 + jax.lax.erf(x * 0.5**0.5))), x
  )


def gelu_tanh(x):
  """The approximation of `gelu` by tanh, likewise.

  For negative numbers, 1 + tanh is what is left of a difference, so that a
  rounded tanh would be most of the error.
  """
  return _rounded_once(functools.partial(jax.nn.gelu, approximate=True), x)


def _rounded_once(activation, x):
  """An elementwise function in float32 or wider, in the dtype of `x`."""
  wide = wide_dtype(x.dtype)
  if x.dtype == wide:
    return activation(x)

  # Recompute in the backward pass: otherwise it keeps float32 activations.
  @functools.partial(jax.checkpoint, prevent_cse=False)
  def run(x):
    return activation(x.astype(wide)).astype(x.dtype)

  return run(x)


class Rounded(NamedTuple):
  """A weight for several products, which is rounded once for all of them.

  Attributes:
    weight: the weight, to which the gradients of the products are added.
    narrow: the same in the dtype of activations, without a gradient.
  """

  weight: jax.Array
  narrow: jax.Array


def round_once(weight, dtype):
  """The weight as products of `dtype` take it; unchanged if that is as wide."""
  if dtype == wide_dtype(dtype):
    return weight
  return Rounded(weight, jax.lax.stop_gradient(weight.astype(dtype)))


def product(equation: str, x, weight):
  """Product of `x` and a weight, an einsum, in float32 or wider.

  The factors are rounded to the dtype of `x`, and sums are not rounded. In the
  backward pass the cotangent is rounded to that dtype, too: both products there
  would otherwise be of float32. The gradient of the weight is summed in
  float32 and rounded to the dtype of the weight.

  Args:
    equation: the einsum.
    x: activations.
    weight: the weight, or what `round_once` returns for it.
  """
  if isinstance(weight, Rounded):
    return _rounded_product(equation, x, *weight)
  if x.dtype == wide_dtype(x.dtype):
    return jnp.einsum(equation, x, weight)
  return _narrow_product(equation, True, x, weight)


def rounded_product(equation: str, x, weight):
  """As `product`, rounded to the dtype of `x`.

  XLA writes the sums of `product` in float32 before it rounds them.
  """
  if x.dtype == wide_dtype(x.dtype):
    return jnp.einsum(equation, x, weight)
  return _narrow_product(equation, False, x, weight)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _narrow_product(equation, is_wide, x, weight):
  einsum = _einsum if is_wide else jnp.einsum
  return einsum(equation, x, weight.astype(x.dtype))


def _narrow_product_forward(equation, is_wide, x, weight):
  return _narrow_product(equation, is_wide, x, weight), (x, weight)


def _narrow_product_backward(equation, is_wide, factors, cotangent):
  del is_wide
  x, weight = factors
  x_bar, weight_bar = _gradients(equation, x, weight.astype(x.dtype), cotangent)
  return x_bar, weight_bar.astype(weight.dtype)


_narrow_product.defvjp(_narrow_product_forward, _narrow_product_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rounded_product(equation, x, weight, narrow):
  del weight  # Only its gradient is computed.
  return _einsum(equation, x, narrow)


def _rounded_product_forward(equation, x, weight, narrow):
  out = _rounded_product(equation, x, weight, narrow)
  return out, (x, narrow, jnp.zeros((), weight.dtype))


def _rounded_product_backward(equation, saved, cotangent):
  x, narrow, like = saved
  x_bar, weight_bar = _gradients(equation, x, narrow, cotangent)
  return x_bar, weight_bar.astype(like.dtype), None


_rounded_product.defvjp(_rounded_product_forward, _rounded_product_backward)


def _einsum(equation, x, narrow):
  wide = wide_dtype(x.dtype)
  return jnp.einsum(equation, x, narrow, preferred_element_type=wide)


def _gradients(equation, x, narrow, cotangent):
  """Cotangents of both factors; that of the weight is not rounded."""
  factor_letters, out = equation.split('->')
  of_x, of_weight = factor_letters.split(',')
  cotangent = cotangent.astype(x.dtype)
  x_bar = jnp.einsum(f'{out},{of_weight}->{of_x}', cotangent, narrow)
  return x_bar, _einsum(f'{of_x},{out}->{of_weight}', x, cotangent)
