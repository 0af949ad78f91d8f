"""Arithmetic of a model whose activations are narrower than its parameters.

Activations and factors of matrix products are bfloat16, say. Sums over tokens,
features or the vocabulary are float32. The gradient of a parameter that each
token uses is a sum over tokens: such a parameter is used in float32, and the
result is rounded.
"""

import functools

import jax
import jax.numpy as jnp


def wide_dtype(dtype):
  """The dtype of sums over many numbers: `dtype`, or float32 if narrower."""
  return jnp.promote_types(dtype, jnp.float32)


def rms_norm(x_BTD, scale_D, norm_epsilon):
  """RMSNorm, arXiv:1910.07467, in float32 or wider.

  The result has the dtype of `x_BTD`. The gradient of the scale is a sum over
  all tokens, so the scale is used in float32 and the product is rounded.
  """
  if x_BTD.dtype == wide_dtype(x_BTD.dtype):
    return _rms_norm(x_BTD, scale_D, norm_epsilon)
  # Recompute in the backward pass: otherwise it keeps float32 activations.
  norm = jax.checkpoint(_rms_norm, prevent_cse=False, static_argnums=2)
  return norm(x_BTD, scale_D, norm_epsilon)


def _rms_norm(x_BTD, scale_D, norm_epsilon):
  wide = wide_dtype(x_BTD.dtype)
  wide_BTD = x_BTD.astype(wide)
  mean_BT1 = jnp.mean(wide_BTD * wide_BTD, -1, keepdims=True)
  normal_BTD = wide_BTD * jax.lax.rsqrt(mean_BT1 + norm_epsilon)
  return (normal_BTD * scale_D[None, None].astype(wide)).astype(x_BTD.dtype)


def product(equation: str, x, weight):
  """Product of `x` and a weight, an einsum, in float32 or wider.

  The factors are rounded to the dtype of `x`, and sums are not rounded. In the
  backward pass the cotangent is rounded to that dtype, too: both products there
  would otherwise be of float32. The gradient of the weight is summed in
  float32 and rounded to the dtype of the weight.
  """
  if x.dtype == wide_dtype(x.dtype):
    return jnp.einsum(equation, x, weight)
  return _narrow_product(equation, x, weight)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _narrow_product(equation, x, weight):
  return jnp.einsum(
    equation,
    x,
    weight.astype(x.dtype),
    preferred_element_type=wide_dtype(x.dtype),
  )


def _narrow_product_forward(equation, x, weight):
  return _narrow_product(equation, x, weight), (x, weight)


def _narrow_product_backward(equation, factors, cotangent):
  x, weight = factors
  factor_letters, out = equation.split('->')
  of_x, of_weight = factor_letters.split(',')
  cotangent = cotangent.astype(x.dtype)
  x_bar = jnp.einsum(
    f'{out},{of_weight}->{of_x}', cotangent, weight.astype(x.dtype)
  )
  weight_bar = jnp.einsum(
    f'{of_x},{out}->{of_weight}',
    x,
    cotangent,
    preferred_element_type=wide_dtype(x.dtype),
  )
  return x_bar, weight_bar.astype(weight.dtype)


_narrow_product.defvjp(_narrow_product_forward, _narrow_product_backward)
