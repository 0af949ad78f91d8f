"""Action tokens and statistics, compared with their formulas in NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest

from stages.vla import pictures
from stages.vla.openvla import action_tokens

TOKENS = action_tokens.ActionTokens(end=32000)
ENTRY = {'q01': [-2.0, 0.5, 0.0], 'q99': [4.0, 0.5, 1.0]}


def test_tokens_are_those_of_numpy():
  rng = np.random.default_rng(0)
  action = np.concatenate([rng.uniform(-1.2, 1.2, 500), [-1, 1, 0]])
  action = action.astype(np.float32)[None]
  edges = np.linspace(-1, 1, 256)
  want = 32000 - np.digitize(np.clip(action, -1, 1), edges)
  got = TOKENS.encode(jnp.asarray(action))
  np.testing.assert_array_equal(got, want)
  assert (TOKENS.start, got.min(), got.max()) == (31744, 31744, 31999)
  centers = (edges[:-1] + edges[1:]) / 2
  index = np.clip(32000 - want - 1, 0, 254)
  np.testing.assert_allclose(TOKENS.decode(got), centers[index], atol=1e-6)


def test_decoding_is_within_half_a_bin():
  action = jnp.linspace(-1.0, 1.0, 999)[None]
  again = TOKENS.decode(TOKENS.encode(action))
  assert jnp.abs(again - action).max() <= 1 / 255 + 1e-6


def test_statistics_normalize_and_back():
  entry = {'action': ENTRY | {'mask': [True, True, False]}}
  stats = action_tokens.action_stats({'robot': entry})
  action = jnp.array([[-2.0, 0.5, 0.3], [4.0, 0.5, 0.9], [1.0, 0.5, 7.0]])
  got = action_tokens.normalize(stats, action)
  want = [[-1, 0, 0.3], [1, 0, 0.9], [0, 0, 7]]
  np.testing.assert_allclose(got, want, atol=1e-6)
  again = action_tokens.unnormalize(stats, got)
  np.testing.assert_allclose(again, action, atol=1e-6)


@pytest.mark.parametrize(
  ('norm_stats', 'key', 'message'),
  [
    ({'bridge': {}, 'fractal': {}}, 'libero', "'libero', but of bridge, frac"),
    ({'bridge': {}, 'fractal': {}}, None, 'several data sets .bridge, fractal'),
    ({}, 'bridge', 'no statistics of actions'),
    ({'a': {'action': {'q01': [1], 'q99': [1, 2]}}}, 'a', 'of one length'),
    ({'a': {'action': {'q01': ['x'], 'q99': [1]}}}, 'a', 'not lists of numb'),
    ({'a': {'action': {'q01': [0], 'q99': [np.inf]}}}, 'a', 'finite'),
    ({'a': 3}, 'a', 'need `action`'),
  ],
)
def test_statistics_that_cannot_be_used_are_refused(norm_stats, key, message):
  with pytest.raises(ValueError, match=message):
    action_tokens.action_stats(norm_stats, key)


def published(image, settings, tower):
  """One tower's input by Pillow, as the published processor makes it."""
  from PIL import Image, ImageOps

  size = settings.sizes[tower]
  picture = Image.fromarray(image)
  if settings.strategy == 'letterbox':
    (w, h), most = picture.size, max(picture.size)
    x, y = int((most - w) / 2), int((most - h) / 2)
    fill = tuple(int(255 * c) for c in settings.means[-1])
    picture = ImageOps.expand(picture, (x, y, x, y), fill)
  w, h = picture.size
  shape = (size, size)
  if settings.strategy != 'resize-naive':
    short = min(w, h)
    shape = int(size * w / short), int(size * h / short)
  # One after the other: Pillow 13 would choose the order by the shape.
  picture = picture.resize((shape[0], h), Image.BICUBIC)
  picture = picture.resize(shape, Image.BICUBIC)
  left, top = (round((n - size) / 2) for n in shape)
  x = np.asarray(picture)[top : top + size, left : left + size] / 255.0
  return (x - settings.means[tower]) / settings.stds[tower]


@pytest.mark.parametrize(
  'strategy', ['resize-naive', 'letterbox', 'resize-crop']
)
@pytest.mark.parametrize('shape', [(21, 34), (30, 17), (14, 14)])
def test_pictures_are_those_of_the_published_processor(strategy, shape):
  settings = pictures.Pictures(sizes=(14, 12), strategy=strategy)
  rng = np.random.default_rng(0)
  image = rng.integers(0, 256, (2, *shape, 3), np.uint8)
  got = settings(jnp.asarray(image))
  for tower in 0, 1:
    want = np.stack([published(x, settings, tower) for x in image])
    np.testing.assert_allclose(got[tower], want, rtol=0, atol=1e-5)


def test_pictures_that_are_not_bytes_are_refused():
  with pytest.raises(ValueError, match='these are float32 .1, 4, 4, 3.'):
    pictures.Pictures()(jnp.zeros((1, 4, 4, 3)))
