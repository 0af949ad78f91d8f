"""Pictures that are prepared for π0 and OpenVLA-OFT, as their clients do it."""

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image
import pytest
import torch

from stages.vla import pictures


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


@pytest.mark.parametrize('shape', [(224, 224), (256, 256), (90, 160)])
def test_the_center_is_cropped_as_openvla_oft_does_it(shape):
  """Its crop_and_resize samples at the points of torch's grid_sample."""
  rng = np.random.default_rng(0)
  x = rng.integers(0, 256, (3, *shape, 3), np.uint8)
  got = np.asarray(pictures.center_crop(jnp.asarray(x), 0.9, 224))
  picture = torch.from_numpy(x).permute(0, 3, 1, 2).float() / 255.0
  scale = torch.eye(2, 3)[None].expand(3, 2, 3) * 0.9**0.5
  grid = torch.nn.functional.affine_grid(
    scale, [3, 3, 224, 224], align_corners=True
  )
  want = torch.nn.functional.grid_sample(picture, grid, align_corners=True)
  # As TensorFlow turns numbers of 0 … 1 into bytes.
  want = (want * 255.5).clip(0, 255).to(torch.uint8).permute(0, 2, 3, 1)
  difference = np.abs(got.astype(int) - want.numpy().astype(int))
  assert difference.max() <= 1 and difference.mean() < 0.01


def test_pictures_are_resized_before_crops_as_tensorflow_does_it():
  """JAX's resizing is TensorFlow's, with its antialiasing."""
  smooth = np.random.default_rng(0).integers(0, 256, (2, 20, 20, 3), np.uint8)
  x = np.kron(smooth, np.ones((1, 13, 13, 1), np.uint8))[:, :256, :256]
  want = jax.image.resize(
    jnp.asarray(x, jnp.float32), (2, 224, 224, 3), 'lanczos3', antialias=True
  )
  want = np.clip(np.round(want), 0, 255).astype(int)
  got = np.asarray(pictures.for_crops(jnp.asarray(x), 224)).astype(int)
  difference = np.abs(got - want)
  assert difference.max() <= 1 and difference.mean() < 0.1


def test_a_crop_is_the_first_step_of_a_tower_and_a_share():
  x = jnp.asarray(np.random.default_rng(0).integers(0, 256, (1, 32, 32, 3)))
  x = x.astype(jnp.uint8)
  plain = pictures.Pictures(sizes=(16, 16))
  cropped = pictures.Pictures(sizes=(16, 16), crop=0.9)
  for got, want in zip(
    cropped(x),
    plain(pictures.center_crop(pictures.for_crops(x, 16), 0.9, 16)),
    strict=True,
  ):
    np.testing.assert_array_equal(got, want)
  with pytest.raises(ValueError, match='crop of 0.0 is given.*up to 1'):
    pictures.Pictures(crop=0.0)
