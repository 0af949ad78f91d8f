"""Bytes of pictures, as questions and as episodes of robots read them."""

import io
import struct
import zlib

import numpy as np
from PIL import Image
import pytest

from rlinf_jax.data import picture_files
from rlinf_jax.data.episode_files import stored_picture


def content(image, kind='PNG', **settings) -> bytes:
  file = io.BytesIO()
  image.save(file, kind, **settings)
  return file.getvalue()


def both(stored: bytes) -> np.ndarray:
  """The picture, as questions and as episodes have it."""
  got = picture_files.decode(stored, 'row 1')
  np.testing.assert_array_equal(got, stored_picture.decode(stored))
  return got


def test_grey_levels_of_sixteen_bits_are_scaled():
  grey = np.linspace(0, 65535, 64 * 64).astype(np.uint16).reshape(64, 64)
  got = both(content(Image.fromarray(grey)))
  assert got.shape == (64, 64, 3)
  error = got - grey[..., None] / 257.0
  assert np.abs(error).max() <= 0.5


@pytest.mark.parametrize('mode', ['RGBA', 'LA', 'P'])
def test_what_is_transparent_is_white(mode):
  alpha = np.zeros((8, 8), np.uint8)
  alpha[2:4], alpha[4:6] = 255, 51  # A black drawing, and a faint one.
  drawing = Image.new('L', (8, 8))
  drawing.putalpha(Image.fromarray(alpha))
  want = np.repeat(255 - alpha[..., None], 3, 2)
  if mode == 'P':
    drawing = Image.fromarray(np.where(alpha == 255, 1, 0).astype(np.uint8))
    drawing.putpalette(6 * [0])
    stored = content(drawing, transparency=0)
    want = np.where(want == 0, 0, 255)
  else:
    stored = content(drawing.convert(mode))
  np.testing.assert_array_equal(both(stored), want)


def chunk(name: bytes, data: bytes) -> bytes:
  """A chunk of a PNG."""
  end = struct.pack('>I', zlib.crc32(name + data))
  return struct.pack('>I', len(data)) + name + data + end


def test_pictures_without_a_range_and_damaged_chunks_are_refused():
  plain = Image.fromarray(np.zeros((4, 4, 3), np.uint8))
  png = content(plain)
  text = chunk(b'zTXt', b'k\0\0' + zlib.compress(b'a' * 5_000_000))
  floats = Image.fromarray(np.linspace(0, 1, 64, dtype='f4').reshape(8, 8))
  wide = Image.fromarray(np.arange(64, dtype='i4').reshape(8, 8))
  for stored, message in (
    (content(floats, 'TIFF'), 'its pixels are floats of 32 bits'),
    (content(wide, 'TIFF'), 'its pixels are integers of 32 bits'),
    (png[:33] + text + png[33:], 'too large'),
    (png[:8] + chunk(b'IHDR', b'1234') + png[33:], 'Truncated IHDR chunk'),
    (png[:40], ''),
  ):
    said = rf'Bytes of row 1 cannot be read as a picture \(.*{message}'
    with pytest.raises(ValueError, match=said):
      picture_files.decode(stored, 'row 1')
    with pytest.raises(ValueError, match=f'no picture that can .*{message}'):
      stored_picture.decode(stored)


@pytest.mark.filterwarnings('ignore:::PIL')
def test_a_damaged_byte_changes_a_picture_or_is_named():
  rng = np.random.default_rng(1)
  grey = Image.fromarray(rng.integers(0, 256, (8, 8), np.uint8))
  for kind in 'PNG', 'JPEG', 'WEBP', 'GIF', 'TIFF', 'BMP':
    whole = content(grey.convert('RGB'), kind)
    for _ in range(150):
      damaged = bytearray(whole)
      at = rng.integers(4, len(damaged), 3)
      damaged[at[0]], damaged[at[1]], damaged[at[2]] = rng.integers(256, size=3)
      try:
        picture_files.decode(bytes(damaged), 'row 1')
      except ValueError as error:
        assert 'row 1' in str(error)
