"""Rotary position embedding, arXiv:2104.09864, with long-context scaling."""

import dataclasses
import math
from typing import Literal

import jax.numpy as jnp
import numpy as np

from stages.models.layers import mixed_precision


@dataclasses.dataclass(frozen=True)
class RopeConfig:
  """Settings of a rotary position embedding.

  Attributes:
    theta: base of the frequencies: plane i turns by theta^(−2i/W) radians a
      token.
    kind: 'default'; 'linear' divides every angle by `factor`; 'yarn'
      (arXiv:2309.00071) divides those of slow planes only and sharpens
      attention; 'llama3' divides those of planes whose wavelength exceeds the
      original context.
    factor: ratio of the extended context to the original one.
    original_context: tokens of context before the extension.
    beta_fast: 'yarn': planes that turn at least this often within
      `original_context` are left alone.
    beta_slow: 'yarn': planes that turn less often are divided by `factor`.
    truncate: 'yarn': round the planes at which the ramp starts and ends.
    attention_factor: 'yarn': scale of the embedding; computed from `factor` if
      None.
    low_freq_factor: 'llama3': planes that turn less often than this within
      `original_context` are divided by `factor`.
    high_freq_factor: 'llama3': planes that turn more often are left alone.
    sections: numbers of planes that turn by the time, the row and the column of
      a token (M-RoPE, arXiv:2409.12191); empty if all turn by its position.
  """

  theta: float = 1e6
  kind: Literal['default', 'linear', 'yarn', 'llama3'] = 'default'
  factor: float = 1.0
  original_context: int = 32768
  beta_fast: float = 32.0
  beta_slow: float = 1.0
  truncate: bool = True
  attention_factor: float | None = None
  low_freq_factor: float = 1.0
  high_freq_factor: float = 4.0
  sections: tuple[int, ...] = ()


def frequencies(rope: RopeConfig, width: int) -> tuple[np.ndarray, float]:
  """Radians per token of the `width / 2` planes, and the embedding's scale."""
  plane_R = np.arange(0, width, 2, dtype=np.float32)
  turn_R = 1.0 / rope.theta ** (plane_R / np.float32(width))
  match rope.kind:
    case 'default':
      return turn_R, 1.0
    case 'linear':
      return turn_R / rope.factor, 1.0
    case 'yarn':
      return _yarn(rope, width, turn_R)
    case 'llama3':
      return _llama3(rope, turn_R), 1.0
  raise ValueError(
    f"Rope kind {rope.kind!r} is not one of 'default', 'linear', 'yarn', "
    "'llama3'."
  )


def _yarn(rope, width, turn_R):
  def plane(turns):
    """The plane that makes `turns` turns within the original context."""
    length = rope.original_context / (turns * 2 * math.pi)
    return width * math.log(length) / (2 * math.log(rope.theta))

  low, high = plane(rope.beta_fast), plane(rope.beta_slow)
  if rope.truncate:
    low, high = math.floor(low), math.ceil(high)
  low, high = max(low, 0), min(high, width - 1)
  span = max(high - low, 0.001)
  slow_R = np.clip((np.arange(width // 2) - low) / span, 0.0, 1.0)
  turn_R = turn_R * (1.0 - slow_R) + turn_R / rope.factor * slow_R
  scale = rope.attention_factor
  if scale is None:
    scale = 0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0
  return turn_R.astype(np.float32), scale


def _llama3(rope, turn_R):
  wavelength_R = 2 * np.pi / turn_R
  smooth_R = (rope.original_context / wavelength_R - rope.low_freq_factor) / (
    rope.high_freq_factor - rope.low_freq_factor
  )
  smooth_R = np.clip(smooth_R, 0.0, 1.0)
  turn_R = (1 - smooth_R) * turn_R / rope.factor + smooth_R * turn_R
  return turn_R.astype(np.float32)


def angles(rope: RopeConfig, width: int, position):
  """Cosine and sine of every plane at every position, in float32.

  Args:
    rope: the rotary embedding.
    width: of a head.
    position: positions [B, T]; or time, row and column of each token, as
      [B, T, 3], if the embedding has sections.
  """
  turn_R, scale = frequencies(rope, width)
  if position.ndim == 3:
    axis_R = np.repeat(np.arange(len(rope.sections)), rope.sections)
    by_plane = position[..., axis_R]
  else:
    by_plane = position[..., None]
  angle_BTR = by_plane.astype(jnp.float32) * turn_R[None, None]
  return jnp.cos(angle_BTR) * scale, jnp.sin(angle_BTR) * scale


def rotate(x_BTHW, cos_BTR, sin_BTR):
  """Rotates each half-split plane of each head, in float32 or wider.

  x′ᵢ = xᵢ cos − xᵢ₊ᵣ sin      x′ᵢ₊ᵣ = xᵢ₊ᵣ cos + xᵢ sin
  """
  cos, sin = cos_BTR[:, :, None], sin_BTR[:, :, None]
  wide = mixed_precision.wide_dtype(x_BTHW.dtype)
  left, right = jnp.split(x_BTHW.astype(wide), 2, axis=-1)
  rotated = (left * cos - right * sin, right * cos + left * sin)
  return jnp.concatenate(rotated, axis=-1).astype(x_BTHW.dtype)
