"""Random changes of pictures: their geometry, colors and keys."""

import colorsys
import dataclasses
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stages.vla import augmentation, pictures

torch = pytest.importorskip('torch')
B, SIZE = 6, 20
KEYS = jax.random.split(jax.random.key(3), B)
SAME_COLORS = {
  'brightness': 0.0,
  'contrast': 0.0,
  'saturation': 0.0,
  'hue': 0.0,
}


def images(rows=SIZE, columns=SIZE):
  rng = np.random.default_rng(0)
  return rng.integers(0, 256, (B, rows, columns, 3), np.uint8)


def ramp(rows, columns):
  """A picture whose first colors are the row and the column of a pixel."""
  x = np.zeros((rows, columns, 3), np.float32)
  x[..., 0], x[..., 1] = np.indices((rows, columns))
  return jnp.asarray(x)


def test_a_random_crop_keeps_a_share_of_the_area_anywhere_in_the_picture():
  rows, columns = 24, 40
  crop = jax.jit(
    jax.vmap(lambda key: pictures.random_crop(ramp(rows, columns), 0.81, key))
  )
  got = np.asarray(crop(jax.random.split(jax.random.key(0), 200)))
  assert got.shape == (200, rows, columns, 3)
  starts = []
  for color, last, axis in ((0, rows - 1, 1), (1, columns - 1, 2)):
    line = got[..., color].mean(3 - axis)  # Constant along the other axis.
    extent = line[:, -1] - line[:, 0]
    np.testing.assert_allclose(extent, 0.9 * last, rtol=1e-4)
    np.testing.assert_allclose(np.diff(line), extent[0] / last, rtol=2e-2)
    assert line.min() >= 0 and line.max() <= last + 1e-3
    starts.append(line[:, 0] / (0.1 * last))
  starts = np.array(starts)
  assert (starts.min(1) < 0.05).all() and (starts.max(1) > 0.95).all()
  assert abs(np.corrcoef(starts)[0, 1]) < 0.3  # Not on a diagonal.


def test_a_random_crop_samples_as_torch_does():
  x = jnp.asarray(images()[0], jnp.float32)
  key = jax.random.key(5)
  where = pictures.random_crop(ramp(SIZE, SIZE), 0.9, key)
  top, left = np.asarray(where[0, 0, :2]) / (SIZE - 1)
  edge = 0.9**0.5
  # The center of the crop, where edges of the picture are −1 and 1.
  shift = [2 * (start + edge / 2) - 1 for start in (left, top)]
  matrix = torch.tensor([[[edge, 0.0, shift[0]], [0.0, edge, shift[1]]]])
  grid = torch.nn.functional.affine_grid(
    matrix.float(), [1, 3, SIZE, SIZE], align_corners=True
  )
  picture = torch.from_numpy(np.array(x)).permute(2, 0, 1)[None]
  want = torch.nn.functional.grid_sample(picture, grid, align_corners=True)
  got = pictures.random_crop(x, 0.9, key)
  np.testing.assert_allclose(got, want[0].permute(1, 2, 0), atol=0.01)


def test_without_a_change_a_picture_stays_as_it_is():
  same = augmentation.OpenVla(crop=1.0, **SAME_COLORS)
  x = images(SIZE, 2 * SIZE)
  got = np.asarray(jax.jit(same)(x, KEYS))
  assert got.dtype == np.uint8 and got.shape == x.shape
  # Bytes are cut off, so that one may be the next lower.
  assert np.abs(got.astype(int) - x).max() <= 1


def one_color(name, size):
  """Pictures of one color each, changed in one way, and as they were."""
  settings = {'crop': 1.0, **SAME_COLORS, name: size}
  x = np.broadcast_to(
    np.uint8([150, 100, 80]), (64, 4, 4, 3)
  )  # No change reaches black or white.
  keys = jax.random.split(jax.random.key(1), len(x))
  got = np.asarray(jax.jit(augmentation.OpenVla(**settings))(x, keys))
  np.testing.assert_array_equal(got, np.broadcast_to(got[:, :1, :1], got.shape))
  return got[:, 0, 0].astype(int), x[0, 0, 0].astype(int)


def test_brightness_shifts_all_colors_alike():
  got, before = one_color('brightness', 0.2)
  shift = got - before
  assert np.ptp(shift, axis=1).max() <= 1
  assert -52 <= shift.min() < -35 and 35 < shift.max() <= 52


def test_contrast_leaves_the_mean_and_scales_what_differs_from_it():
  x = np.full((64, 4, 4, 3), 100, np.uint8)
  x[:, :2] = 160
  change = augmentation.OpenVla(crop=1.0, **SAME_COLORS | {'contrast': 0.2})
  keys = jax.random.split(jax.random.key(1), len(x))
  got = np.asarray(jax.jit(change)(x, keys)).astype(float)
  np.testing.assert_allclose(got.mean((1, 2, 3)), 130, atol=1)
  factor = (got[:, 0] - got[:, -1]).mean((1, 2)) / 60
  assert 0.78 <= factor.min() < 0.85 and 1.15 < factor.max() <= 1.22


@pytest.mark.parametrize(
  'name, size, component', [('hue', 0.05, 0), ('saturation', 0.2, 1)]
)
def test_hue_and_saturation_change_alone(name, size, component):
  got, before = one_color(name, size)
  hsv = lambda x: np.array(colorsys.rgb_to_hsv(*(x / 255.0)))
  changed = np.array([hsv(x) for x in got])
  start = hsv(before)
  others = [i for i in range(3) if i != component]
  np.testing.assert_allclose(
    changed[:, others], np.broadcast_to(start[others], (64, 2)), atol=0.02
  )
  moved = changed[:, component] - start[component]
  if name == 'saturation':
    moved /= start[1]
  moved = (moved + 0.5) % 1.0 - 0.5  # A hue is an angle.
  slack = 0.02  # Of bytes.
  assert -size - slack <= moved.min() < -0.6 * size
  assert 0.6 * size < moved.max() <= size + slack


@pytest.mark.parametrize('kind', ['OpenVla', 'Openpi'])
def test_a_row_is_changed_as_alone_and_by_its_key(kind):
  x = images()
  if kind == 'Openpi':
    change = lambda x, keys: augmentation.Openpi()(
      jnp.asarray(x, jnp.float32) / 255.0, keys, at_wrist=False
    )
  else:
    change = augmentation.OpenVla()
  change = jax.jit(change)
  whole = np.asarray(change(x, KEYS), np.float32)
  alone = np.asarray(change(x[2:3], KEYS[2:3]), np.float32)
  np.testing.assert_allclose(whole[2], alone[0], atol=1e-6)
  other = np.asarray(change(x[2:3], KEYS[3:4]), np.float32)
  assert np.abs(other[0] - alone[0]).mean() > 0.01 * np.abs(alone).mean()


def test_a_camera_at_the_wrist_is_colored_only():
  rng = np.random.default_rng(0)
  x = np.repeat(rng.random((B, 1, 2, 3), np.float32), SIZE, axis=1)
  x = jnp.asarray(np.repeat(x, SIZE // 2, axis=2))  # Two halves.
  change = augmentation.Openpi()
  wrist = np.asarray(change(x, KEYS, at_wrist=True))
  for half in (wrist[:, :, : SIZE // 2], wrist[:, :, SIZE // 2 :]):
    assert np.ptp(half, axis=(1, 2)).max() < 1e-6
  moved = np.asarray(change(x, KEYS, at_wrist=False))
  assert np.ptp(moved[:, :, : SIZE // 2], axis=(1, 2)).max() > 0.05
  differs = np.abs(wrist - np.asarray(x)).max((1, 2, 3)) > 1e-3
  assert differs.any()  # Half of all pictures keep their colors.


def test_a_missing_library_is_named(monkeypatch):
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
  with pytest.raises(ImportError, match=r'need augmax: pip install .*augment'):
    augmentation.OpenVla()


def test_strengths_are_those_that_were_published():
  assert dataclasses.asdict(augmentation.OpenVla()) == {
    'crop': 0.9,
    'brightness': 0.2,
    'contrast': 0.2,
    'saturation': 0.2,
    'hue': 0.05,
  }
