"""Rasterizes 2-D scenes as images: round-brush strokes, seen from above.

A disc is a stroke of length zero. Coverage of a pixel follows from the distance
of its center to the stroke's edge, so edges are anti-aliased and a motion of
less than a pixel changes the image.
"""

from collections.abc import Iterable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

SIZE = 128  # Edge, in pixels, of an image for people.
BACKGROUND = (0.1, 0.1, 0.12)  # RGB in 0 … 1, as all colors here.


class Stroke(NamedTuple):
  """All points within a radius of a line segment.

  Attributes:
    start: first end of the segment.
    end: second end; equal to `start` for a disc.
    radius: in the units of the plane.
    color: red, green and blue.
  """

  start: Float[Array, ' X']
  end: Float[Array, ' X']
  radius: float
  color: tuple[float, float, float]


def disc(center_X, radius: float, color) -> Stroke:
  """All points within a radius of a point."""
  return Stroke(center_X, center_X, radius, color)


def image(
  strokes: Iterable[Stroke],
  size: int,
  extent: float = 1.0,
  background: tuple[float, float, float] = BACKGROUND,
) -> UInt8[Array, 'size size 3']:
  """Draws strokes one over the other.

  Args:
    strokes: the first lies lowest.
    size: edge of the image, in pixels.
    extent: the image spans −extent … extent on both axes, the first to the
      right and the second upwards.
    background: color where there is no stroke.
  """
  pixel = 2.0 * extent / size
  line = pixel * (jnp.arange(size) + 0.5) - extent
  at = jnp.stack(jnp.meshgrid(line, line[::-1]), -1)
  image = jnp.broadcast_to(jnp.asarray(background), (size, size, 3))
  for stroke in strokes:
    inside = (stroke.radius - _distance(at, stroke)) / pixel
    cover = jnp.clip(inside + 0.5, 0.0, 1.0)[:, :, None]
    image += cover * (jnp.asarray(stroke.color)[None, None] - image)
  return jnp.round(255.0 * image).astype(jnp.uint8)


def _distance(at, stroke: Stroke):
  """Distance of points `[…, X]` from the segment of a stroke, `[…]`.

  Coordinates are arrays of their own: XLA for CPUs fuses the drawing then, in
  place of a reduction over two numbers for each stroke.
  """
  (x, y), (along_x, along_y) = (
    (offset[..., 0], offset[..., 1])
    for offset in (at - stroke.start[None, None], stroke.end - stroke.start)
  )
  # Position of the nearest point along the segment, 0 … 1; 0 for a disc.
  share = x * along_x + y * along_y
  share /= jnp.maximum(along_x**2 + along_y**2, 1e-12)
  share = jnp.clip(share, 0.0, 1.0)
  return jnp.sqrt((x - share * along_x) ** 2 + (y - share * along_y) ** 2)
