"""Pictures of questions for a model: decoded, resized and cut into patches."""

from collections.abc import Sequence
import dataclasses
import io
import math
from typing import NamedTuple

import numpy as np

from rlinf_jax.data import pictures
from rlinf_jax.data.episode_files import stored_picture
from stages import base
from stages.language import huggingface, tokens
from stages.models import config as config_lib
from stages.models.vision import patches, vision_files

MOST_PIXELS = 2**26  # Of a file, before it is resized.


class Encoded(NamedTuple):
  """The tokens of a question, and its pictures.

  Attributes:
    token: its tokens, with one for each square of a picture.
    images: its pictures.
    grids: rows and columns of each, in squares.
    where: file and line, for errors.
  """

  token: list[int]
  images: tuple[pictures.Image, ...] = ()
  grids: tuple[tuple[int, int], ...] = ()
  where: str = ''


@dataclasses.dataclass(frozen=True)
class Reader:
  """Settings by which a model reads pictures.

  Attributes:
    checkpoint: its folder, for errors.
    vision: its tower; None for a model that reads text alone.
    min_pixels: fewest pixels that a picture is resized to.
    max_pixels: the most.
  """

  checkpoint: str
  vision: config_lib.VisionConfig | None
  min_pixels: int = 0
  max_pixels: int = 0

  @property
  def edge(self) -> int:
    """Edge of a square, in pixels."""
    return self.vision.patch_size * self.vision.merge

  def encode(
    self, token: list[int], images: Sequence[pictures.Image], where: str
  ) -> Encoded:
    """The tokens of a question with as many for each picture as it has squares.

    Args:
      token: tokens with one for each picture.
      images: the pictures, which are decoded once to see that they can be.
      where: file and line, for errors.

    Raises:
      ValueError: for a file that is no picture, is too large or too thin, for a
        model that reads text alone, or a prompt with other places than those.
    """
    if self.vision is None:
      if images:
        raise ValueError(
          f'{where} has pictures, and {self.checkpoint} reads text alone: give '
          'a model with a vision tower (Qwen2.5-VL), or a file without '
          'pictures.'
        )
      return Encoded(token, where=where)
    place = self.vision.token
    if token.count(place) != len(images):
      raise ValueError(
        f'{where} has {len(images)} pictures, and the prompt that the chat '
        f'template of {self.checkpoint} makes of it has {token.count(place)} '
        f'places for pictures (token {place}): remove such tokens from the '
        'text, or copy the chat template that was published with the model.'
      )
    grids = tuple(self._grid(image, where) for image in images)
    if token and token[-1] == place:
      raise ValueError(
        f'The prompt of {where} ends with a picture: end it with text.'
      )
    waiting, wide = iter(grids), []
    for x in token:
      wide += [x] * (math.prod(next(waiting)) if x == place else 1)
    return Encoded(wide, tuple(images), grids, where)

  def _grid(self, image: pictures.Image, where: str) -> tuple[int, int]:
    """Rows and columns of a picture, in squares."""
    rows, columns, _ = decode(image, where).shape
    try:
      shape = patches.resized_shape(
        (rows, columns), self.edge, self.min_pixels, self.max_pixels
      )
    except ValueError as error:
      raise ValueError(f'A picture of {where} {error}.') from error
    return shape[0] // self.edge, shape[1] // self.edge

  def read(self, x: Encoded) -> list[np.ndarray]:
    """The pictures of a question in their sizes."""
    return [
      resize(decode(image, x.where), (rows * self.edge, columns * self.edge))
      for image, (rows, columns) in zip(x.images, x.grids, strict=True)
    ]

  def room(self, rows: Sequence[Encoded]) -> int:
    """The most patches of a row."""
    if self.vision is None:
      return 0
    squares = max((sum(map(math.prod, x.grids)) for x in rows), default=0)
    return squares * self.vision.merge**2

  def batch(
    self, rows: Sequence[Encoded], *, length: int, room: int
  ) -> base.Prompt | patches.PicturePrompt:
    """Prompts, padded on the left to `length` tokens, and their pictures.

    Args:
      rows: questions.
      length: columns of prompts.
      room: patches of each row; 0 where no question has a picture.
    """
    prompt = tokens.pad_left([x.token for x in rows], length)
    if not room:
      return prompt
    place = self.vision.token
    own = [patches.positions(x.token, x.grids, place) for x in rows]
    images = [self.read(x) for x in rows]
    found = patches.stacked(images, own, self.vision, length=length, room=room)
    return patches.PicturePrompt(*prompt, found)


def reader(
  checkpoint: str, min_pixels: int | None = None, max_pixels: int | None = None
) -> Reader:
  """The reader of a model's pictures.

  Args:
    checkpoint: folder of the model.
    min_pixels: fewest pixels of a picture; those of the model if None.
    max_pixels: the most, likewise.

  Raises:
    ValueError: for limits that no picture keeps.
  """
  vision = huggingface.vision(checkpoint)
  if vision is None:
    return Reader(checkpoint, None)
  usual = vision_files.read_processor(checkpoint)
  edge = vision.patch_size * vision.merge
  most = usual.max_pixels if max_pixels is None else max_pixels
  # A model's own least may be above the most that is asked for.
  least = min(usual.min_pixels, most) if min_pixels is None else min_pixels
  if not least <= most or most < edge**2:
    raise ValueError(
      f'Pictures are to have {least} to {most} pixels, and squares of {edge} x '
      f'{edge} are cut out of them: give max_pixels (MAX_PIXELS in gin) of at '
      f'least {edge**2}, and min_pixels below it.'
    )
  return Reader(checkpoint, vision, least, most)


def decode(image: pictures.Image, where: str) -> np.ndarray:
  """A picture, uint8 [rows, columns, 3], turned as its file says.

  Its colors are those of `stored_picture.rgb`.

  Raises:
    ValueError: for a file that is no picture or is too large.
  """
  from PIL import Image, ImageOps

  name = 'Bytes' if isinstance(image, bytes) else str(image)
  file = io.BytesIO(image) if isinstance(image, bytes) else image
  try:
    with stored_picture.readable(), Image.open(file) as found:
      size = math.prod(found.size)
      if size <= MOST_PIXELS:
        turned = ImageOps.exif_transpose(found)
        return np.asarray(stored_picture.rgb(turned))
  except ValueError as error:
    raise ValueError(
      f'{name} of {where} cannot be read as a picture ({error}): mend the '
      'file, or leave the row out.'
    ) from error
  raise ValueError(
    f'{where} has a picture of {size} pixels, and at most {MOST_PIXELS} are '
    'read: make it smaller.'
  )


def resize(image: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
  """A picture in another size, by Pillow's bicubic filter as in training."""
  from PIL import Image

  if image.shape[:2] == shape:
    return image
  resized = Image.fromarray(image).resize(
    (shape[1], shape[0]), Image.Resampling.BICUBIC
  )
  return np.asarray(resized)
