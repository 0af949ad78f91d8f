"""Worlds in the plane as pictures: strokes of a round brush, from above.

A disc is a stroke that goes nowhere. What part of a pixel a stroke covers is
told by how far the pixel's middle is from its edge, so edges are smooth, and a
motion of less than a pixel can be seen.
"""

from collections.abc import Iterable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

SIZE = 128  # Pixels along each edge of a picture for people.
PAPER = (0.1, 0.1, 0.12)  # Red, green and blue of 0 to 1, as all colors.


class Stroke(NamedTuple):
  """All points that are near enough to a line.

  Attributes:
    start: of the line.
    end: of it; the same as `start` for a disc.
    radius: how near, in the units of the plane.
    color: red, green and blue.
  """

  start: Float[Array, ' X']
  end: Float[Array, ' X']
  radius: float
  color: tuple[float, float, float]


def disc(center_X, radius: float, color) -> Stroke:
  """All points that are near enough to one."""
  return Stroke(center_X, center_X, radius, color)


def picture(
  strokes: Iterable[Stroke], size: int, reach: float = 1.0
) -> UInt8[Array, 'size size 3']:
  """Draws strokes one over the other.

  Args:
    strokes: the first lies lowest.
    size: pixels along each edge.
    reach: the plane is seen from −reach to reach on both axes, the first to
      the right and the second upwards.
  """
  pixel = 2.0 * reach / size
  line = pixel * (jnp.arange(size) + 0.5) - reach
  at = jnp.stack(jnp.meshgrid(line, line[::-1]), -1)
  drawn = jnp.broadcast_to(jnp.asarray(PAPER), (size, size, 3))
  for stroke in strokes:
    inside = (stroke.radius - _away(at, stroke)) / pixel
    cover = jnp.clip(inside + 0.5, 0.0, 1.0)[:, :, None]
    drawn += cover * (jnp.asarray(stroke.color)[None, None] - drawn)
  return jnp.round(255.0 * drawn).astype(jnp.uint8)


def _away(at, stroke: Stroke):
  """How far points `[…, X]` are from the line of a stroke."""
  along_X = stroke.end - stroke.start
  off = at - stroke.start[None, None]
  # Of the line's point that is nearest, how far along it is; 0 of a disc's.
  share = off @ along_X / jnp.maximum(along_X @ along_X, 1e-12)
  share = jnp.clip(share, 0.0, 1.0)[:, :, None]
  return jnp.linalg.norm(off - share * along_X[None, None], axis=-1)
