"""Decodes pictures from the bytes of their files, in red, green and blue."""

from collections.abc import Iterator
import contextlib
import io
import struct
import zlib

import numpy as np

WHITE = (255, 255, 255)


def decode(content: bytes) -> np.ndarray:
  """A picture from its JPEG or PNG bytes, uint8 [rows, columns, 3].

  Raises:
    ValueError: if these bytes are no picture, or `rgb` refuses it.
  """
  from PIL import Image

  try:
    with readable(), Image.open(io.BytesIO(content)) as image:
      return np.asarray(rgb(image))
  except ValueError as error:
    message = f'It is no picture that can be decoded ({error}).'
    raise ValueError(message) from error


def rgb(image):
  """A picture of Pillow in RGB, with 8 bits a color.

  Grey levels of 16 bits are scaled to 8. What is transparent becomes white, as
  in qwen_vl_utils.

  Raises:
    ValueError: for numbers of 32 bits, which say nothing of their range.
  """
  from PIL import Image

  if image.mode in ('I', 'F'):
    raise ValueError(
      f'its pixels are {"floats" if image.mode == "F" else "integers"} of 32 '
      'bits, whose black and white are not known: store it with 8 or 16 bits'
    )
  if image.mode.startswith('I;16'):
    grey = (np.asarray(image).astype(np.uint32) + 128) // 257
    image = Image.fromarray(grey.astype(np.uint8))
  if image.has_transparency_data:
    image = image.convert('RGBA')
    ground = Image.new('RGB', image.size, WHITE)
    ground.paste(image, mask=image.getchannel('A'))
    return ground
  return image.convert('RGB')


@contextlib.contextmanager
def readable() -> Iterator[None]:
  """Raises ValueError for what Pillow raises where a file is damaged."""
  from PIL import Image

  try:
    yield
  except (
    EOFError,
    IndexError,
    KeyError,
    OSError,
    OverflowError,
    SyntaxError,
    TypeError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
  ) as error:
    raise ValueError(f'{error}') from error
