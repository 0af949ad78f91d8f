"""FiLM of OpenVLA-OFT, against torch, and its published files."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stages.models.files import weights
from stages.vla.openvla import (
  film,
  film_files,
  openvla_oft,
  openvla_oft_files,
)
from tests.stages.vla.openvla import openvla_files_test as plain
from tests.stages.vla.openvla import openvla_oft_files_test as files
from tests.stages.vla.openvla import openvla_oft_test as oft
from tests.stages.vla.openvla import openvla_test

torch = pytest.importorskip('torch', reason='Reference models need torch.')
case = openvla_test.case  # The same blocks, once a module.
model = oft.model
RANK, FILE = 32, 'vision_backbone--150000_checkpoint.pt'
LINEAR = 'attn.qkv', 'attn.proj', 'mlp.fc1', 'mlp.fc2', 'attn_pool.kv'


def drawn(shapes, stddev):
  rng = np.random.default_rng(3)
  return jax.tree.map(
    lambda x: jnp.asarray(stddev * rng.normal(size=x.shape), x.dtype), shapes
  )


def config(case):
  return dataclasses.replace(oft.config(case), film=True)


@pytest.fixture(scope='module')
def params(case, model):
  """Those of the whole model, with random FiLM."""
  return model[2] | {'film': drawn(film.param_shapes(case.config), 0.3)}


def modulated(tower, x, scale, shift):
  """The one layer that is run, with FiLM in its middle."""
  if hasattr(tower.encoder, 'layer'):
    x, layer = tower.embeddings(x), tower.encoder.layer[0]
    x = x + layer.layer_scale1(layer.attention(layer.norm1(x))[0])
    x = (1 + scale) * x + shift
    return (x + layer.layer_scale2(layer.mlp(layer.norm2(x))))[:, 3:]
  x, layer = tower.embeddings(x), tower.encoder.layers[0]
  x = x + layer.self_attn(layer.layer_norm1(x), attention_mask=None)[0]
  x = (1 + scale) * x + shift
  return x + layer.mlp(layer.layer_norm2(x))


def reference_states(case, project, params, obs, b):
  """States that predict the tokens of one row, without padding."""
  llama = case.torch['llama']
  length = int(obs.prompt.mask[b].sum())
  token = [*map(int, obs.prompt.token[b, :length]), oft.STOP]
  words = llama.get_input_embeddings()(torch.tensor(token))
  of_tower = {}
  for name in film.TOWERS:
    own = jax.tree.map(np.array, params['film'][name]['layers'])
    of_tower[name] = [
      words.mean(0) @ torch.tensor(own[f'{kind}_OD'][0])
      + torch.tensor(own[f'{kind}_bias_D'][0])
      for kind in ('scale', 'shift')
    ]
  seen = []
  for image in obs.images:
    inputs = case.config.pictures(image[b : b + 1], jnp.float32)
    towers = [
      modulated(
        case.torch[name],
        torch.tensor(np.array(x)).permute(0, 3, 1, 2),
        *of_tower[name],
      )
      for name, x in zip(film.TOWERS, inputs, strict=True)
    ]
    seen.append(case.torch['projector'](torch.cat(towers, -1)))
  state = torch.tensor(np.array(obs.state[b]))[None, None]
  empty = torch.zeros(1, oft.Z * oft.A, words.shape[1])
  x = words[None]
  x = torch.cat(
    [x[:, :1], *seen, project(state), x[:, 1:-1], empty, x[:, -1:]], 1
  )
  mask = torch.zeros(1, 1, x.shape[1], x.shape[1])
  result = llama(inputs_embeds=x, attention_mask=mask)
  start = 4 + 4 + 1 + length - 1  # Patches, state, prompt, one before.
  end = openvla_test.END
  return result.logits[
    0, start : start + oft.Z * oft.A, end - openvla_test.BINS : end
  ]


def test_scores_are_those_of_torch_in_the_published_order(case, model, params):
  obs, own = oft.observation(), config(case)
  with torch.no_grad():
    want = torch.stack(
      [reference_states(case, model[0], params, obs, b) for b in range(3)]
    )
  want = torch.log_softmax(want, -1)
  rng = np.random.default_rng(2)
  first = openvla_test.END - openvla_test.BINS
  action = rng.integers(first, openvla_test.END, (3, oft.Z * oft.A))
  logp = want.gather(-1, torch.tensor(action - first)[..., None])
  logp = logp.reshape(3, oft.Z, oft.A)
  policy = functools.partial(
    oft.openvla_oft_policy.policy, own, oft.STATS, logp_of='token'
  )
  evaluate = jax.jit(policy().evaluate)
  got = evaluate(params, obs, jnp.asarray(action, jnp.int32))
  np.testing.assert_allclose(got.logp, logp, rtol=0, atol=1e-4)
  # It is what FiLM changes that was compared.
  without = oft.policy(case, logp_of='token')
  other = jax.jit(without.evaluate)(params, obs, jnp.asarray(action, jnp.int32))
  assert (np.abs(got.logp - other.logp).max((1, 2)) > 1e-2).all()


def test_a_new_film_changes_nothing_and_all_of_it_learns(case, model):
  own, obs = config(case), oft.observation()
  fresh = model[2] | {'film': film.init_params(case.config)}
  states = functools.partial(openvla_oft.action_states, obs=obs)
  np.testing.assert_array_equal(
    states(own, fresh), states(oft.config(case), fresh)
  )

  def loss(part):
    return (states(own, fresh | {'film': part}) ** 2).sum()

  gradient = jax.grad(loss)(fresh['film'])
  for path, leaf in jax.tree_util.tree_leaves_with_path(gradient):
    assert (np.asarray(leaf) != 0).any(), path


def test_arithmetic_in_bfloat16_is_near(case, params):
  obs, own = oft.observation(), config(case)
  llama = dataclasses.replace(case.config.llama, dtype='bfloat16')
  narrow = dataclasses.replace(
    own, openvla=dataclasses.replace(case.config, llama=llama)
  )
  want = openvla_oft.action_states(own, params, obs)
  got = openvla_oft.action_states(narrow, params, obs)
  assert got.dtype == jnp.bfloat16
  error = np.abs(got.astype(jnp.float32) - want)
  assert error.max() < 0.1 * np.abs(want).max()


def test_gradients_of_matrices_are_not_rounded_in_bfloat16(case, params):
  llama = dataclasses.replace(case.config.llama, dtype='bfloat16')
  narrow = dataclasses.replace(case.config, llama=llama)
  mean_BO = drawn(jax.ShapeDtypeStruct((5, llama.D), 'float32'), 1.0)

  def total(own):
    found = film.films(narrow, own, mean_BO)
    return sum(jnp.square(x).sum() for x in jax.tree.leaves(found))

  grads = jax.grad(total)(params['film'])
  for path, x in jax.tree_util.tree_leaves_with_path(grads):
    if path[-1].key.endswith('_OD'):
      assert x.dtype == jnp.float32
      assert (x != x.astype(jnp.bfloat16)).any(), path


def tower_tensors():
  """Tensors of towers as published fine-tuning saves them.

  In bfloat16, with adapters of `peft` and FiLM in float32.
  """
  generator = torch.Generator().manual_seed(5)
  draw = lambda *shape: 0.3 * torch.randn(*shape, generator=generator)
  found = {}
  for name, shape in plain.shapes().items():
    if not name.startswith('vision_backbone.'):
      continue
    tower, _, rest = name.removeprefix('vision_backbone.').partition('.')
    if rest.startswith('blocks.'):
      i, _, rest = rest.removeprefix('blocks.').partition('.')
      rest = f'blocks.{i}.block.{rest}'
    module, _, kind = rest.rpartition('.')
    stem = f'vision_backbone.{tower}.'
    if not module.endswith(LINEAR):
      found[f'{stem}{rest}'] = draw(*shape).to(torch.bfloat16)
      continue
    module = f'{stem}{module}'
    found[f'{module}.base_layer.{kind}'] = draw(*shape).to(torch.bfloat16)
    if kind == 'weight':
      found[f'{module}.lora_A.default.weight'] = draw(RANK, shape[1])
      found[f'{module}.lora_B.default.weight'] = draw(shape[0], RANK)
  for tower, D, L in ('featurizer', 8, 2), ('fused_featurizer', 6, 3):
    for i in range(L):
      for kind in 'scale', 'shift':
        stem = f'vision_backbone.{tower}.blocks.{i}.{kind}'
        found |= {f'{stem}.weight': draw(D, 12), f'{stem}.bias': draw(D)}
  return found


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  path = files.published(tmp_path_factory.mktemp('plus'))
  torch.save(tower_tensors(), path / FILE)
  return path


def test_adapters_are_added_and_a_file_is_exported_byte_for_byte(
  folder, tmp_path
):
  own = files.policy(folder)
  params = own.init(jax.random.key(0))
  stored = tower_tensors()
  stem = 'vision_backbone.fused_featurizer.blocks.1'
  proj = f'{stem}.block.attn.proj'
  want = stored[f'{proj}.base_layer.weight'].float() + 0.5 * (
    stored[f'{proj}.lora_B.default.weight']
    @ stored[f'{proj}.lora_A.default.weight']
  )
  got = params['siglip']['layers']['out_HWD'][1].reshape(6, 6)
  np.testing.assert_allclose(got.T, want, rtol=0, atol=1e-5)
  layers = params['film']['siglip']['layers']
  assert layers['scale_OD'].shape == (2, 12, 6)  # The last layer is not run.
  want = stored[f'{stem}.scale.weight']
  np.testing.assert_array_equal(layers['scale_OD'][1].T, want)
  obs = files.observation(jnp.ones((2, files.O)))
  keys = jax.random.split(jax.random.key(1), 2)
  words = obs._replace(prompt=obs.prompt._replace(token=obs.prompt.token + 1))
  act = jax.jit(own.act)
  assert (
    act(params, obs, keys).action != act(params, words, keys).action
  ).any()

  out = tmp_path / 'exported'
  openvla_oft_files.export(out, params, folder, towers=plain.TOWERS)
  written = torch.load(out / FILE)
  assert [*written] == [*stored]
  assert all(torch.equal(written[key], x) for key, x in stored.items())
  for suffix in '.safetensors', '.pt':
    want, got = (files.tensors(x, suffix) for x in (folder, out))
    assert got.keys() == want.keys() and want
    assert all(got[key].tobytes() == x.tobytes() for key, x in want.items())


def test_trained_towers_are_written_whole_beside_empty_adapters(
  folder, tmp_path
):
  params = files.policy(folder).init(jax.random.key(0))
  params = jax.tree.map(lambda x: x, params)
  layers = params['dino']['layers']
  layers['out_HWD'] = layers['out_HWD'] + 1
  layers = params['film']['dino']['layers']
  layers['shift_bias_D'] = layers['shift_bias_D'] + 1
  out = tmp_path / 'exported'
  openvla_oft_files.export(out, params, folder, towers=plain.TOWERS)
  before, after = tower_tensors(), torch.load(out / FILE)
  stem = 'vision_backbone.featurizer.blocks.0'
  changed = {
    f'{stem}.shift.bias',
    f'{stem}.block.attn.proj.base_layer.weight',
    f'{stem}.block.attn.proj.lora_B.default.weight',
  }
  assert changed == {
    key for key, x in before.items() if not torch.equal(x, after[key])
  }
  again = files.policy(out).init(jax.random.key(0))
  for part in 'dino', 'siglip', 'film':
    for want, got in zip(
      *map(jax.tree.leaves, (params[part], again[part])), strict=True
    ):
      np.testing.assert_allclose(got, want, rtol=2**-8, atol=1e-6)


def test_a_model_without_film_gets_one_and_keeps_it(tmp_path):
  folder = files.published(tmp_path / 'plain')
  own = files.policy(folder, film=True)
  params = own.init(jax.random.key(0))
  assert not any(np.any(x) for x in jax.tree.leaves(params['film']))
  params['film'] = drawn(params['film'], 0.3)
  out = tmp_path / 'plus'
  openvla_oft_files.export(out, params, folder, towers=plain.TOWERS)
  written = torch.load(out / film_files.NEW_FILE)
  stored = tower_tensors()
  assert {*written} == {*stored}  # Names that published code expects.
  assert all(written[key].shape == x.shape for key, x in stored.items())
  again = files.policy(out).init(jax.random.key(1))
  for part in params.keys() - {'critic'}:
    for want, got in zip(
      *map(jax.tree.leaves, (params[part], again[part])), strict=True
    ):
      np.testing.assert_array_equal(got, want)


def test_files_that_do_not_fit_are_refused(folder, tmp_path):
  copy = files.published(tmp_path / 'copy')
  state = tower_tensors()
  stem = 'vision_backbone.featurizer'
  state['stray'] = state.pop(f'{stem}.blocks.0.scale.bias')
  state[f'{stem}.pos_embed'] = torch.zeros(1, 5, 8)
  torch.save(state, copy / FILE)
  with pytest.raises(weights.CheckpointError) as error:
    files.policy(copy).init(jax.random.key(0))
  for part in (
    f'missing {stem}.blocks.0.scale.bias',
    'extra stray',
    'pos_embed is [1, 5, 8], expected [1, 4, 8]',
  ):
    assert part in str(error.value)
  state = tower_tensors()
  qkv = f'{stem}.blocks.0.block.attn.qkv'
  state[f'{qkv}.lora_A.default.weight'] = torch.zeros(RANK - 1, 8)
  torch.save(state, copy / FILE)
  with pytest.raises(weights.CheckpointError, match='has no pair of adapters'):
    files.policy(copy).init(jax.random.key(0))
  torch.save(state, copy / 'vision_backbone--7_checkpoint.pt')
  with pytest.raises(weights.CheckpointError, match='several files of towers'):
    files.policy(copy)
  with pytest.raises(weights.CheckpointError, match='OpenVLA-OFT.*read it by'):
    plain.policy(folder)
