"""Decodes pictures that are stored with the steps of an episode."""

import io

import numpy as np


def decode(content: bytes) -> np.ndarray:
  """A picture from its JPEG or PNG bytes, uint8 [rows, columns, 3].

  Raises:
    ValueError: if these bytes are no picture.
  """
  from PIL import Image

  try:
    return np.asarray(Image.open(io.BytesIO(content)).convert('RGB'))
  except (OSError, SyntaxError, TypeError, Image.DecompressionBombError) as e:
    raise ValueError(f'It is no picture that can be decoded ({e}).') from e
