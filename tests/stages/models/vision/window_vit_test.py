"""Qwen2.5-VL, compared with `transformers` in torch."""

import copy
import json
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import numpy as st
import transformers
from transformers import vision_utils

from sharding import mesh as mesh_lib
from sharding import rules
from stages.language import huggingface, language_model, sample, stops
from stages.models import block, transformer
from stages.models.files import weights, weights_writer
from stages.models.vision import patches, window_vit
import torch_reference
import vision_reference
from vision_reference import torch

STEPS = 16


class Case(NamedTuple):
  """The same model in torch and in JAX, its folder and prompts for it."""

  torch: Any
  folder: Any
  config: transformer.Config
  params: Any
  prompt: patches.PicturePrompt
  inputs: dict


@pytest.fixture(
  scope='module',
  params=[
    pytest.param(False, id='untied'),
    pytest.param(True, id='tied', marks=pytest.mark.claims),
  ],
)
def case(request, tmp_path_factory):
  folder = tmp_path_factory.mktemp('model')
  reference = vision_reference.model(request.param)
  reference.save_pretrained(folder)
  config = huggingface.load_config(folder)
  params = huggingface.load_params(folder, config)
  prompt = vision_reference.prompts(config.vision)
  inputs = vision_reference.inputs(prompt, config.vision)
  return Case(reference, folder, config, params, prompt, inputs)


def repeat(prompt, group_size):
  return jax.tree.map(lambda x: np.repeat(x, group_size, axis=0), prompt)


def test_each_layer_of_the_tower_is_that_of_transformers(case):
  # In float64: in float32, torch's layers, of numbers up to 73, are themselves
  # off by 8e-5, and ours by 5e-5.
  tower, seen = copy.deepcopy(case.torch.model.visual).double(), []
  hooks = [
    x.register_forward_hook(lambda m, _, y: seen.append(y.numpy()))
    for x in tower.blocks
  ]
  with torch.no_grad():
    pixels = case.inputs['pixel_values'].double()
    out = tower(pixels, case.inputs['image_grid_thw'])
  [hook.remove() for hook in hooks]
  order, _ = vision_utils.get_vision_window_index(
    case.inputs['image_grid_thw'], 2, tower.window_size, 14
  )
  order = order.argsort().numpy()
  c, params, pictures = case.config, case.params['tower'], case.prompt.pictures
  model = window_vit.WindowTower(c)
  is_patch = pictures.place[..., 0] >= 0
  x = model.apply({'params': params}, pictures, method='embed')
  layer = block.Block(window_vit.layer_config(c))
  contexts = window_vit.contexts(c.vision, pictures.place)
  for i, want in enumerate(seen):
    is_window = jnp.array(i not in c.vision.full_layers)
    own = {'params': transformer.layer_params(params, i)}
    x, _ = layer.apply(own, x, is_window, *contexts)
    want = want.reshape(-1, 4, want.shape[-1])[order].reshape(want.shape)
    np.testing.assert_allclose(x[is_patch], want, rtol=0, atol=1e-4)
  got = model.apply({'params': params}, x, method='merge')
  np.testing.assert_allclose(
    got[is_patch[:, ::4]], out.pooler_output, rtol=0, atol=1e-4
  )


def test_logits_of_text_with_pictures_are_those_of_transformers(case):
  model = transformer.Transformer(case.config)
  got = jax.jit(model.apply)({'params': case.params}, *case.prompt)
  with torch.no_grad():
    want = case.torch(**case.inputs).logits.numpy()
  real = case.prompt.mask > 0
  np.testing.assert_allclose(got[real], want[real], rtol=0, atol=1e-4)
  blank = case.prompt.pictures._replace(patch=case.prompt.pictures.patch * 0)
  other = jax.jit(model.apply)({'params': case.params}, *case.prompt[:2], blank)
  assert np.abs(got - other)[real].max() > 0.1


def test_cached_decoding_sees_the_logits_of_transformers(case, monkeypatch):
  logits, shape = [], sample.shape

  def spy(logit_BTV, sampling):
    jax.debug.callback(logits.append, logit_BTV[:, 0], ordered=True)
    return shape(logit_BTV, sampling)

  monkeypatch.setattr(sample, 'shape', spy)
  policy = language_model.policy(case.config, response_length=STEPS)
  x = jax.jit(policy.act)(
    case.params, case.prompt, torch_reference.keys(len(case.prompt.mask))
  )
  jax.block_until_ready(x)
  jax.effects_barrier()
  got = np.stack([np.asarray(step) for step in logits], 1)
  want = decoded(case, torch.tensor(np.asarray(x.action)).long())
  np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)


@torch.no_grad()
def decoded(case, action_BT):
  """Logits [B, T, V] of each token by torch, from a cache."""
  out = case.torch(**case.inputs, use_cache=True)
  mask_BP, logits = case.inputs['attention_mask'], [out.logits[:, -1]]
  for t in range(action_BT.shape[1] - 1):
    token_B1 = action_BT[:, t : t + 1]
    mask_BP = torch.cat([mask_BP, torch.ones_like(token_B1)], 1)
    position_B1 = (
      mask_BP.sum(1, keepdim=True) - 1 + case.torch.model.rope_deltas
    )
    out = case.torch(
      input_ids=token_B1,
      attention_mask=mask_BP,
      position_ids=position_B1.expand(3, -1, -1),
      past_key_values=out.past_key_values,
      use_cache=True,
    )
    logits.append(out.logits[:, -1])
  return torch.stack(logits, 1).numpy()


def test_log_probabilities_and_gradients_are_those_of_transformers(
  case, tmp_path
):
  rng = np.random.default_rng(1)
  B, T, group_size = len(case.prompt.mask), 6, 2
  action = rng.integers(2, 90, (B * group_size, T))
  weight = rng.normal(size=action.shape).astype(np.float32)
  policy = language_model.policy(case.config, response_length=T)

  def loss(params):
    prompt = repeat(case.prompt, group_size)
    logp = policy.evaluate(
      params, prompt, jnp.asarray(action), group_size=group_size
    ).logp
    return (logp * weight).sum(), logp

  (_, logp), slope = jax.jit(jax.value_and_grad(loss, has_aux=True))(
    case.params
  )
  want_logp = reference_logp(case, action, group_size)
  np.testing.assert_allclose(logp, want_logp.detach(), rtol=0, atol=1e-4)
  case.torch.zero_grad()
  (want_logp * torch.tensor(weight)).sum().backward()
  want = {
    vision_reference.published(name): x.grad.numpy()
    for name, x in case.torch.named_parameters()
  }
  weights_writer.save(tmp_path, slope, huggingface.names(case.folder))
  got = st.load_file(tmp_path / weights.SINGLE)
  assert got.keys() == want.keys()
  for name, x in want.items():
    error = np.linalg.norm(got[name] - x)
    assert error <= 1e-4 * np.linalg.norm(x), name


def reference_logp(case, action_BT, group_size: int):
  """Log-probabilities of completions by torch."""
  prompt = repeat(case.prompt, group_size)
  inputs = vision_reference.inputs(prompt, case.config.vision)
  action = torch.tensor(action_BT).long()
  ones = torch.ones_like(action)
  for name, more in (
    ('input_ids', action),
    ('attention_mask', ones),
    ('mm_token_type_ids', 0 * ones.int()),
  ):
    inputs[name] = torch.cat([inputs[name], more], 1)
  P = prompt.mask.shape[1]
  logit_BTV = case.torch(**inputs).logits[:, P - 1 : -1]
  logp_BTV = torch.log_softmax(logit_BTV, -1)
  return logp_BTV.gather(-1, action[..., None])[..., 0]


def test_slots_and_groups_give_the_same_tokens(case):
  group_size = 2
  prompt = repeat(case.prompt, group_size)
  keys = torch_reference.keys(len(prompt.mask))

  def act(prompt, keys, group_size=1, **settings):
    policy = language_model.policy(
      case.config, response_length=8, stop=(3, 4, 5, 6), **settings
    )
    run = jax.jit(policy.act, static_argnames='group_size')
    return run(case.params, prompt, keys, group_size=group_size)

  want = act(prompt, keys)
  for x in (
    act(prompt, keys, group_size),
    act(prompt, keys, group_size, slots=3),
  ):
    np.testing.assert_array_equal(x.action, want.action)
    np.testing.assert_allclose(x.logp, want.logp, rtol=0, atol=1e-5)


def test_transformers_reads_what_is_written(case, tmp_path):
  huggingface.save(
    tmp_path, case.params, case.config, model_type='qwen2_5_vl', eos_token_id=1
  )
  assert huggingface.load_config(tmp_path) == case.config
  assert stops.stop_tokens(tmp_path) == (1,)
  read = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path)
  with torch.no_grad():
    got, want = (m(**case.inputs).logits for m in (read, case.torch))
  np.testing.assert_array_equal(got, want)
  huggingface.export(tmp_path / 'again', case.params, case.folder)
  params = huggingface.load_params(tmp_path / 'again', case.config)
  jax.tree.map(np.testing.assert_array_equal, params, case.params)


def test_a_published_config_is_read(case, tmp_path):
  """Published files have the language model's settings at the top."""
  raw = json.loads((case.folder / 'config.json').read_text())
  text = raw.pop('text_config')
  rope = text.pop('rope_parameters')
  raw = text | raw | {'rope_theta': rope['rope_theta']}
  raw['rope_scaling'] = {
    'type': 'mrope',
    'mrope_section': rope['mrope_section'],
  }
  (tmp_path / 'config.json').write_text(json.dumps(raw))
  assert huggingface.load_config(tmp_path) == case.config


def test_random_parameters_have_all_leaves(case):
  params = transformer.init_params(case.config, jax.random.key(0))
  assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, case.params)


def test_a_text_model_refuses_pictures(case):
  config = transformer.Config(V=97, D=8, L=1, H=2, K=1, W=4, F=8)
  with pytest.raises(ValueError, match='reads text alone'):
    jax.eval_shape(
      lambda params: transformer.Transformer(config).apply(
        {'params': params}, *case.prompt
      ),
      transformer.param_shapes(config),
    )


def test_what_a_model_with_pictures_cannot_do_is_refused(case):
  with pytest.raises(ValueError, match='cannot be: leave packed_tokens out'):
    language_model.policy(case.config, response_length=4, packed_tokens=64)
  with pytest.raises(ValueError, match='an engine .vLLM. is not supported'):
    huggingface.policy(
      str(case.folder), response_length=4, engine=lambda *a, **k: None
    )


def test_a_mesh_changes_only_rounding(case):
  rng = np.random.default_rng(2)
  action = rng.integers(2, 90, (len(case.prompt.mask), 3))
  policy = language_model.policy(case.config, response_length=3)
  mesh = mesh_lib.mesh(jax.devices()[:4], {'fsdp': 2, 'tensor': 2})

  def loss(params, prompt, action):
    return policy.evaluate(params, prompt, action).logp.sum()

  run = jax.value_and_grad(loss)
  want = jax.jit(run)(case.params, case.prompt, action)
  layouts = rules.shardings(case.params, mesh)
  by_row = jax.sharding.NamedSharding(
    mesh, jax.sharding.PartitionSpec(rules.mesh_axes(mesh, 'B'))
  )
  params = jax.device_put(case.params, layouts)
  rows = jax.device_put((case.prompt, action), by_row)
  with jax.set_mesh(mesh):
    got = jax.jit(run, out_shardings=(None, layouts))(params, *rows)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    error = np.linalg.norm(np.asarray(a) - b)
    assert error <= 1e-4 * np.linalg.norm(b)


def test_a_group_reads_its_pictures_once(case):
  """Those of its later rows are not looked at."""
  group_size = 2
  prompt = repeat(case.prompt, group_size)
  other = prompt.pictures.patch.copy()
  other[1::group_size] = 255 - other[1::group_size]
  changed = prompt._replace(pictures=prompt.pictures._replace(patch=other))
  policy = language_model.policy(case.config, response_length=3)
  run = jax.jit(policy.act, static_argnames='group_size')
  keys = torch_reference.keys(len(prompt.mask))
  want, got = (
    run(case.params, x, keys, group_size=group_size) for x in (prompt, changed)
  )
  np.testing.assert_array_equal(got.logp, want.logp)
