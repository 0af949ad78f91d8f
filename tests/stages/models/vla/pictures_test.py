"""Pictures that are prepared for π0: bits of openpi's client."""

import jax.numpy as jnp
import numpy as np
from PIL import Image
import pytest

from stages.models.vla import pictures


@pytest.mark.parametrize(
  'shape', [(48, 64), (64, 48), (17, 90), (28, 28), (5, 7)]
)
def test_a_border_is_added_as_openpi_does_it(shape):
  """Its client resizes by Pillow and pastes onto a black picture."""
  size = 28
  rng = np.random.default_rng(0)
  x = rng.integers(0, 256, (2, *shape, 3), np.uint8)
  ratio = max(shape[1] / size, shape[0] / size)
  rows, columns = int(shape[0] / ratio), int(shape[1] / ratio)
  got = pictures.resize_with_pad(jnp.asarray(x), size)
  for before, after in zip(x, got, strict=True):
    want = Image.new('RGB', (size, size), 0)
    small = Image.fromarray(before).resize(
      (columns, rows), Image.Resampling.BILINEAR
    )
    want.paste(small, (int((size - columns) / 2), int((size - rows) / 2)))
    np.testing.assert_array_equal(after, np.asarray(want))
