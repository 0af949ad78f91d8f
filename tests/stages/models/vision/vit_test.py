"""Vision transformers, compared with `transformers` in torch, layer by layer.

Sizes are small and random. Scales, biases and tokens are drawn, too: those of
the usual initialization are one and zero, which would hide mistakes.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
from safetensors import numpy as st

from stages.models.files import weights, weights_writer
from stages.models.vision import names, resample, vit

torch = pytest.importorskip('torch', reason='Reference models need torch.')

import transformers  # noqa: E402

COMMON = {'num_hidden_layers': 3, 'image_size': 15, 'patch_size': 5}
CASES = {
  'dinov2': (
    transformers.Dinov2WithRegistersModel,
    transformers.Dinov2WithRegistersConfig(
      hidden_size=14,
      num_attention_heads=2,
      mlp_ratio=3,
      num_register_tokens=3,
      **COMMON,
    ),
    names.DINOV2,
    {'embeddings.mask_token'},
  ),
  'siglip': (
    transformers.SiglipVisionModel,
    transformers.SiglipVisionConfig(
      hidden_size=18,
      num_attention_heads=3,
      intermediate_size=25,
      vision_use_head=False,
      **COMMON,
    ),
    names.SIGLIP,
    set(),
  ),
}


class Case(NamedTuple):
  """The same tower in torch and in JAX, and its folder."""

  torch: Any
  folder: Any
  config: vit.Config
  params: Any
  names: Any
  ignored: frozenset


@pytest.fixture(scope='module', params=CASES)
def case(request, tmp_path_factory):
  kind, settings, tensors, ignored = CASES[request.param]
  torch.manual_seed(0)
  reference = kind(settings).eval()
  with torch.no_grad():
    for parameter in reference.parameters():
      parameter.add_(0.3 * torch.randn_like(parameter))
  folder = tmp_path_factory.mktemp('tower')
  reference.save_pretrained(folder)
  config = names.of_transformers(settings.to_dict())
  stored = stored_names(folder)
  ignored = frozenset(ignored | {n for n in stored if n.startswith('head.')})
  params = weights.load(
    folder, vit.param_shapes(config), tensors, ignored=ignored
  )
  return Case(reference, folder, config, params, tensors, ignored)


def stored_names(folder):
  with safetensors.safe_open(folder / weights.SINGLE, 'numpy') as file:
    return set(file.keys())


def images(rows, columns=None):
  rng = np.random.default_rng(1)
  return rng.normal(size=(2, rows, columns or rows, 3)).astype(np.float32)


def to_torch(image):
  return torch.tensor(image).permute(0, 3, 1, 2)


def first_layers(case, n, final_norm):
  """The tower up to a layer, and its parameters."""
  config = dataclasses.replace(case.config, L=n, final_norm=final_norm)
  layers = jax.tree.map(lambda x: x[:n], case.params['layers'])
  return config, case.params | {'layers': layers}


def run(config, params, image, *rest, method='__call__'):
  model = vit.VisionTransformer(config)
  image = jnp.asarray(image)
  return model.apply({'params': params}, image, *rest, method=method)


def test_every_layer_is_that_of_transformers(case):
  image = images(case.config.image_size)
  with torch.no_grad():
    want = case.torch(to_torch(image), output_hidden_states=True)
  got = run(case.config, case.params, image, method='embed')
  np.testing.assert_allclose(got, want.hidden_states[0], atol=1e-5)
  for n in 1, 2, 3:
    got = run(*first_layers(case, n, False), image)
    np.testing.assert_allclose(got, want.hidden_states[n], rtol=0, atol=1e-4)
  got = run(case.config, case.params, image)
  np.testing.assert_allclose(got, want.last_hidden_state, rtol=0, atol=1e-4)


def test_inner_features_are_patches_before_the_last_layer(case):
  image = images(case.config.image_size)
  config = vit.inner(case.config)
  with torch.no_grad():
    want = case.torch(to_torch(image), output_hidden_states=True)
  want = want.hidden_states[-2][:, case.config.prefix :]
  # The last layer and the norm need not be there at all.
  shapes = vit.param_shapes(config)
  left_out = {n for n in stored_names(case.folder) if '.2.' in n}
  left_out |= {'layernorm.weight', 'layernorm.bias'}
  left_out |= {'post_layernorm.weight', 'post_layernorm.bias'}
  params = weights.load(
    case.folder, shapes, case.names, ignored=case.ignored | left_out
  )
  got = run(config, params, image, method='patches')
  np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)


def modulated(layer, x, scale, shift):
  """A layer of `transformers`, with (1 + γ) x + β before its feed-forward."""
  if hasattr(layer, 'attention'):
    x = x + layer.layer_scale1(layer.attention(layer.norm1(x))[0])
    x = (1 + scale[:, None]) * x + shift[:, None]
    return x + layer.layer_scale2(layer.mlp(layer.norm2(x)))
  x = x + layer.self_attn(layer.layer_norm1(x), attention_mask=None)[0]
  x = (1 + scale[:, None]) * x + shift[:, None]
  return x + layer.mlp(layer.layer_norm2(x))


def test_film_is_between_attention_and_feedforward_of_every_layer(case):
  image, c = images(case.config.image_size), case.config
  rng = np.random.default_rng(4)
  scale, shift = rng.normal(size=(2, c.L, 2, c.D)).astype(np.float32)
  with torch.no_grad():
    start = case.torch(to_torch(image), output_hidden_states=True)
    want = start.hidden_states[0]
    blocks = case.torch.encoder
    blocks = blocks.layer if hasattr(blocks, 'layer') else blocks.layers
    for n, layer in enumerate(blocks):
      want = modulated(layer, want, *map(torch.tensor, (scale[n], shift[n])))
  film = vit.Film(jnp.asarray(scale), jnp.asarray(shift))
  got = run(*first_layers(case, c.L, False), image, film)
  np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-4)
  none = vit.Film(jnp.zeros_like(film.scale_LBD), jnp.zeros_like(shift))
  got = run(*first_layers(case, c.L, False), image, none)
  np.testing.assert_array_equal(
    got, run(*first_layers(case, c.L, False), image)
  )


@pytest.mark.parametrize('shape', [(10, 25), (20, 20)])
def test_positions_of_other_sizes_are_those_of_transformers(case, shape):
  image = images(*shape)
  forward = case.torch
  if case.config.prefix == 0:
    forward = functools.partial(forward, interpolate_pos_encoding=True)
  with torch.no_grad():
    want = forward(to_torch(image)).last_hidden_state
  got = run(case.config, case.params, image)
  np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)


def test_a_tower_is_written_as_it_was_read(case, tmp_path):
  weights_writer.save(tmp_path, case.params, case.names)
  want = st.load_file(case.folder / weights.SINGLE)
  got = st.load_file(tmp_path / weights.SINGLE)
  assert got.keys() == want.keys() - case.ignored
  for name, tensor in got.items():
    assert tensor.tobytes() == want[name].tobytes()
    assert tensor.shape == want[name].shape


def test_narrow_arithmetic_is_near_and_gradients_are_wide(case):
  image = images(case.config.image_size)
  narrow = dataclasses.replace(case.config, dtype='bfloat16')
  loss = lambda config, params: (
    run(config, params, image).astype(jnp.float32) ** 2
  ).mean()
  both = [
    jax.jit(jax.value_and_grad(functools.partial(loss, config)))(case.params)
    for config in (case.config, narrow)
  ]
  (want, want_grad), (got, got_grad) = both
  np.testing.assert_allclose(got, want, rtol=0.02)
  for x, y in zip(
    jax.tree.leaves(got_grad), jax.tree.leaves(want_grad), strict=True
  ):
    assert x.dtype == jnp.float32
    assert np.linalg.norm(x - y) <= 0.2 * np.linalg.norm(y) + 1e-3


def test_images_that_patches_do_not_fill_are_refused():
  config = vit.Config(image_size=10, patch_size=5, D=4, L=1, H=1, F=4)
  params = vit.init_params(config, jax.random.key(0))
  with pytest.raises(ValueError, match='12 by 10 pixels cannot be cut'):
    run(config, params, images(12, 10))


@pytest.mark.parametrize('kind', ['bilinear', 'bicubic', 'lanczos'])
def test_resized_images_have_the_bits_of_pillow(kind):
  from PIL import Image

  rng = np.random.default_rng(0)
  for rows, columns in (31, 47), (9, 8), (47, 20):
    image = rng.integers(0, 256, (rows, columns, 3), np.uint8)
    image[: rows // 2] = np.where(image[: rows // 2] < 128, 0, 255)
    resample_kind = getattr(Image.Resampling, kind.upper())
    # One after the other: Pillow 13 would choose the order by the shape.
    want = Image.fromarray(image).resize((14, rows), resample_kind)
    want = np.asarray(want.resize((14, 12), resample_kind))
    got = resample.resize_image(jnp.asarray(image), (12, 14), kind)
    np.testing.assert_array_equal(got, want)


def test_timm_parts_are_the_rows_of_one_matrix(tmp_path):
  config = vit.Config(
    image_size=10, patch_size=5, D=6, L=2, H=2, F=7, has_class=True, registers=2
  )
  params = vit.init_params(config, jax.random.key(0))
  weights_writer.save(tmp_path, params, names.TIMM, shard_bytes=600)
  assert len(list(tmp_path.glob('*.safetensors'))) > 1
  stored = {}
  for path in tmp_path.glob('*.safetensors'):
    stored |= st.load_file(path)
  qkv = stored['blocks.1.attn.qkv.weight'].reshape(3, 2, 3, 6)
  for part, kind in zip(qkv, ('query', 'key', 'value'), strict=True):
    want = params['layers'][f'{kind}_DHW'][1]
    np.testing.assert_array_equal(part, np.moveaxis(want, 0, -1))
  assert stored['reg_token'].shape == (1, 2, 6)
  assert stored['pos_embed'].shape == (1, 4, 6)
  again = weights.load(tmp_path, vit.param_shapes(config), names.TIMM)
  jax.tree.map(np.testing.assert_array_equal, again, params)
