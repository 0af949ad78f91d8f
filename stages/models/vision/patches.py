"""Pictures as patches beside the tokens of prompts, for Qwen2.5-VL.

A picture is resized until both edges are multiples of 28 pixels, and cut into
patches of 14. Squares of 2 x 2 patches are adjacent, as each becomes one token.
All pictures of a row lie end to end, and rows are padded to the same number of
patches: a step is compiled once for pictures of all sizes.
"""

from collections.abc import Sequence
import math
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8
import numpy as np

from stages.models import config as config_lib

COLORS = 3


class Pictures(NamedTuple):
  """The pictures of prompts, and the positions of their tokens.

  Attributes:
    patch: bytes of patches: colors, rows and columns of each.
    place: for each patch, the number of its picture in the row (−1 on padding),
      its row and its column, in patches.
    position: time, row and column of each token of a prompt, see `positions`.
  """

  patch: UInt8[Array, 'B S O']
  place: Int[Array, 'B S 3']
  position: Int[Array, 'B P 3']


class PicturePrompt(NamedTuple):
  """Prompt tokens as in `base.Prompt`, some of them places of pictures.

  Attributes:
    token: token ids; padding may hold any id.
    mask: 1 on real tokens, 0 on padding. The last token is none of a picture.
    pictures: the pictures, in the order of their tokens.
  """

  token: Int[Array, 'B P']
  mask: Int[Array, 'B P']
  pictures: Pictures


def blank(vision: config_lib.VisionConfig) -> Pictures:
  """One row with the fewest patches and one token, all padding."""
  shape = 1, vision.merge**2
  patch = jnp.zeros((*shape, COLORS * vision.patch_size**2), jnp.uint8)
  return Pictures(
    patch, jnp.full((*shape, 3), -1), jnp.zeros((1, 1, 3), jnp.int32)
  )


def resized_shape(
  shape: tuple[int, int], multiple: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
  """Rows and columns that a picture is resized to, as Qwen2-VL does it.

  Both are multiples of `multiple`. Their product is within the limits, and
  their ratio about that of the picture.

  Raises:
    ValueError: for a picture whose longer edge is over 200 times the shorter.
  """
  rows, columns = shape
  if max(shape) > 200 * min(shape):
    raise ValueError(
      f'is {columns} pixels wide and {rows} high, and no edge may be over 200 '
      'times the other: cut it'
    )
  near = [round(n / multiple) * multiple for n in shape]
  if math.prod(near) > max_pixels:
    shrink = math.sqrt(rows * columns / max_pixels)
    near = [
      max(multiple, math.floor(n / shrink / multiple) * multiple) for n in shape
    ]
  elif math.prod(near) < min_pixels:
    grow = math.sqrt(min_pixels / (rows * columns))
    near = [math.ceil(n * grow / multiple) * multiple for n in shape]
  return near[0], near[1]


def cut(
  image: UInt8[np.ndarray, 'rows columns 3'], vision: config_lib.VisionConfig
) -> UInt8[np.ndarray, 'S O']:
  """Patches of one picture, in the order of `places`."""
  rows, columns, colors = image.shape
  u, m = vision.patch_size, vision.merge
  squares = image.reshape(
    rows // (u * m), m, u, columns // (u * m), m, u, colors
  )
  # Squares, patches in them, colors, rows and columns of pixels.
  squares = squares.transpose(0, 3, 1, 4, 6, 2, 5)
  return squares.reshape(-1, colors * u * u)


def places(grid: tuple[int, int], merge: int) -> Int[np.ndarray, 'S 2']:
  """Row and column of each patch of a picture of `grid` rows and columns."""
  row, column = np.indices(grid)

  def in_squares(x):
    rows, columns = grid
    x = x.reshape(rows // merge, merge, columns // merge, merge)
    return x.swapaxes(1, 2).reshape(-1)

  return np.stack([in_squares(row), in_squares(column)], -1)


def positions(
  token: Sequence[int], grids: Sequence[tuple[int, int]], place: int
) -> Int[np.ndarray, 'P 3']:
  """Time, row and column of each token of a prompt, arXiv:2409.12191 §2.1.

  They are equal in text, and go on after a picture from its longer edge. The
  tokens of a picture have one time, and the row and the column of their squares
  added to it.

  Args:
    token: the prompt, without padding, with one token for each square.
    grids: rows and columns of each picture, in squares.
    place: the token of pictures.
  """
  found, start, at, waiting = [], 0, 0, iter(grids)
  while at < len(token):
    if token[at] != place:
      found.append([[start] * 3])
      start, at = start + 1, at + 1
      continue
    grid = next(waiting)
    row, column = (x.reshape(-1) for x in np.indices(grid))
    found.append(start + np.stack([0 * row, row, column], -1))
    start, at = start + max(grid), at + math.prod(grid)
  return np.concatenate(found).astype(np.int32)


def stacked(
  rows: Sequence[Sequence[UInt8[np.ndarray, 'rows columns 3']]],
  positions_P: Sequence[Int[np.ndarray, 'P 3']],
  vision: config_lib.VisionConfig,
  *,
  length: int,
  room: int,
) -> Pictures:
  """Pictures of several rows, padded.

  Args:
    rows: the resized pictures of each.
    positions_P: `positions` of each, padded on the left here.
    vision: the tower.
    length: P, columns of prompts.
    room: patches of a row; at least those of its pictures.
  """
  u = vision.patch_size
  patch = np.zeros((len(rows), room, COLORS * u * u), np.uint8)
  place = np.full((len(rows), room, 3), -1, np.int32)
  position = np.zeros((len(rows), length, 3), np.int32)
  for i, (images, own) in enumerate(zip(rows, positions_P, strict=True)):
    end = 0
    for k, image in enumerate(images):
      grid = image.shape[0] // u, image.shape[1] // u
      start, end = end, end + math.prod(grid)
      patch[i, start:end] = cut(image, vision)
      place[i, start:end, 0] = k
      place[i, start:end, 1:] = places(grid, vision.merge)
    position[i, length - len(own) :] = own
  return Pictures(patch, place, position)


def normalized(
  patch_BSO: UInt8[Array, 'B S O'], vision: config_lib.VisionConfig
) -> Float[Array, 'B S 3 u v']:
  """Patches as floats, with the mean and the deviation of each color."""
  u = vision.patch_size
  x = patch_BSO.reshape(*patch_BSO.shape[:2], COLORS, u, u)
  mean, std = (
    jnp.array(c, jnp.float32).reshape(1, 1, -1, 1, 1)
    for c in (vision.mean, vision.std)
  )
  return (x.astype(jnp.float32) / 255.0 - mean) / std
