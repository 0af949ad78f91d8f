"""Published checkpoints of OpenVLA: a folder of the published layout."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors import numpy as st

from stages import base
from stages.models.files import weights
from stages.models.vision import vit
from stages.vla.openvla import (
  openvla,
  openvla_files,
  openvla_policy,
  tuning_files,
)

TOWERS = {
  'tiny_dino': vit.Config(
    image_size=4,
    patch_size=2,
    D=8,
    L=2,
    H=2,
    F=10,
    has_class=True,
    registers=4,
    layer_scale=True,
    activation='gelu',
  ),
  'tiny_siglip': vit.Config(
    image_size=4, patch_size=2, D=6, L=3, H=2, F=9, activation='gelu'
  ),
}
BRIDGE = {'q01': [-1.0, -2.0, 0.0], 'q99': [1.0, 2.0, 1.0]}
CONFIG = {
  'architectures': ['OpenVLAForActionPrediction'],
  'model_type': 'openvla',
  'image_resize_strategy': 'resize-naive',
  'image_sizes': [4, 4],
  'n_action_bins': 16,
  'norm_stats': {'bridge_orig': {'action': BRIDGE}, 'fractal': {}},
  'pad_to_multiple_of': 8,
  'timm_model_ids': list(TOWERS),
  'timm_override_act_layers': [None, None],
  'torch_dtype': 'bfloat16',
  'use_fused_vision_backbone': True,
  'text_config': {
    'model_type': 'llama',
    'vocab_size': 40,
    'hidden_size': 12,
    'num_hidden_layers': 2,
    'num_attention_heads': 2,
    'intermediate_size': 14,
    'torch_dtype': 'bfloat16',
  },
}


def tower_shapes(prefix, D, L, F, tokens):
  """Names and shapes of a tower of timm, as OpenVLA stores them."""
  found = {
    'patch_embed.proj.weight': (D, 3, 2, 2),
    'patch_embed.proj.bias': (D,),
    'pos_embed': (1, 4, D),
    'norm.weight': (D,),
    'norm.bias': (D,),
  }
  if tokens:
    found |= {'cls_token': (1, 1, D), 'reg_token': (1, 4, D)}
  else:
    found |= {'attn_pool.latent': (1, 1, D), 'attn_pool.kv.weight': (2 * D, D)}
  for i in range(L):
    layer = {
      'norm1.weight': (D,),
      'norm1.bias': (D,),
      'attn.qkv.weight': (3 * D, D),
      'attn.qkv.bias': (3 * D,),
      'attn.proj.weight': (D, D),
      'attn.proj.bias': (D,),
      'norm2.weight': (D,),
      'norm2.bias': (D,),
      'mlp.fc1.weight': (F, D),
      'mlp.fc1.bias': (F,),
      'mlp.fc2.weight': (D, F),
      'mlp.fc2.bias': (D,),
    }
    if tokens:
      layer |= {'ls1.scale_factor': (D,), 'ls2.scale_factor': (D,)}
    found |= {f'blocks.{i}.{name}': shape for name, shape in layer.items()}
  return {f'vision_backbone.{prefix}.{n}': shape for n, shape in found.items()}


def shapes():
  """Names and shapes of all tensors of the folder."""
  found = tower_shapes('featurizer', 8, 2, 10, True)
  found |= tower_shapes('fused_featurizer', 6, 3, 9, False)
  for i, (outs, ins) in enumerate([(56, 14), (12, 56), (12, 12)], 1):
    found[f'projector.fc{i}.weight'] = outs, ins
    found[f'projector.fc{i}.bias'] = (outs,)
  D, F, model = 12, 14, 'language_model.model'
  for i in range(2):
    layer = {f'self_attn.{x}_proj': (D, D) for x in 'qkvo'}
    layer |= {'mlp.gate_proj': (F, D), 'mlp.up_proj': (F, D)}
    layer |= {'mlp.down_proj': (D, F)}
    layer |= {'input_layernorm': (D,), 'post_attention_layernorm': (D,)}
    for name, shape in layer.items():
      found[f'{model}.layers.{i}.{name}.weight'] = shape
  return found | {
    f'{model}.embed_tokens.weight': (40, D),
    f'{model}.norm.weight': (D,),
    'language_model.lm_head.weight': (40, D),
  }


def write(folder, tensors, **changed):
  """Writes a folder in three shards."""
  folder.mkdir(exist_ok=True)
  (folder / 'config.json').write_text(json.dumps(CONFIG | changed))
  (folder / 'tokenizer.model').write_bytes(b'pieces')
  file_of = {}
  for n in range(3):
    file = f'model-{n + 1:05d}-of-00003.safetensors'
    shard = {name: tensors[name] for name in sorted(tensors)[n::3]}
    st.save_file(shard, folder / file, metadata={'format': 'pt'})
    file_of |= dict.fromkeys(shard, file)
  index = {'metadata': {}, 'weight_map': file_of}
  (folder / weights.INDEX).write_text(json.dumps(index))
  return folder


def test_the_published_sizes_are_those_of_the_published_folder(tmp_path):
  text = {'model_type': 'llama', 'vocab_size': 32064}
  published = CONFIG | {
    'image_sizes': [224, 224],
    'n_action_bins': 256,
    'pad_to_multiple_of': 64,
    'timm_model_ids': list(openvla_files.TOWERS)[:2],
    'text_config': text | {'torch_dtype': 'bfloat16'},
  }
  (tmp_path / 'config.json').write_text(json.dumps(published))
  got = openvla_files.read(tmp_path).config
  assert got == openvla.published(dtype='bfloat16')


@pytest.fixture(scope='module')
def tensors():
  rng = np.random.default_rng(0)
  return {
    name: (0.3 * rng.normal(size=shape)).astype(ml_dtypes.bfloat16)
    for name, shape in shapes().items()
  }


def policy(folder, **kwargs):
  return openvla_files.policy(str(folder), towers=TOWERS, **kwargs)


def test_a_published_folder_acts_and_is_exported_byte_for_byte(
  tensors, tmp_path
):
  folder = write(tmp_path / 'published', tensors)
  own = policy(folder, data_set='bridge_orig', dtype='float32')
  params = own.init(jax.random.key(0))
  prompt = base.Prompt(jnp.full((2, 3), 5), jnp.ones((2, 3), jnp.int32))
  image = jnp.full((2, 9, 7, 3), 80, jnp.uint8)
  obs = openvla_policy.Observation(image, prompt)
  x = jax.jit(own.act)(params, obs, jax.random.split(jax.random.key(1), 2))
  assert x.action.shape == (2, 3)
  assert ((x.action >= 16) & (x.action < 32)).all()
  command = own.to_env_action(x.action)
  assert (command >= np.array(BRIDGE['q01'])[None]).all()
  assert (command <= np.array(BRIDGE['q99'])[None]).all()

  out = tmp_path / 'exported'
  openvla_files.export(out, params, folder, towers=TOWERS, shard_bytes=4000)
  files = list(out.glob('*.safetensors'))
  got = {k: v for path in files for k, v in st.load_file(path).items()}
  assert len(files) > 1 and got.keys() == tensors.keys()
  for name, tensor in tensors.items():
    assert got[name].dtype == tensor.dtype and got[name].shape == tensor.shape
    assert got[name].tobytes() == tensor.tobytes(), name
  assert json.loads((out / 'config.json').read_text()) == CONFIG
  assert (out / 'tokenizer.model').read_bytes() == b'pieces'


def test_statistics_of_fine_tuning_come_first(tensors, tmp_path):
  folder = write(tmp_path / 'model', tensors)
  assert set(openvla_files.read(folder, towers=TOWERS).norm_stats) == {
    'bridge_orig',
    'fractal',
  }
  tuned = {'libero': {'action': BRIDGE}}
  (folder / tuning_files.STATISTICS).write_text(json.dumps(tuned))
  assert openvla_files.read(folder, towers=TOWERS).norm_stats == tuned
  with pytest.raises(ValueError, match="of 'bridge_orig', but of libero"):
    policy(folder, data_set='bridge_orig')


def test_one_error_names_every_tensor_that_does_not_fit(tensors, tmp_path):
  wrong = dict(tensors)
  wrong['stray'] = wrong.pop('projector.fc3.bias')
  qkv = 'vision_backbone.featurizer.blocks.0.attn.qkv.weight'
  wrong[qkv] = wrong[qkv][:-1].copy()
  folder = write(tmp_path / 'model', wrong)
  config = openvla_files.read(folder, towers=TOWERS).config
  with pytest.raises(weights.CheckpointError) as error:
    openvla_files.load_params(folder, config)
  for part in (
    'missing projector.fc3.bias',
    'extra stray',
    f'{qkv} is [23, 8], expected [24, 8]',
  ):
    assert part in str(error.value)


@pytest.mark.parametrize(
  ('changed', 'message'),
  [
    ({'model_type': 'llama'}, "type 'llama', expected 'openvla': give"),
    ({'model_type': None, 'type': 'pi0'}, "type 'pi0', expected 'openvla'"),
    ({'text_config': None}, 'text_config is missing'),
    ({'text_config': {'model_type': 'phi'}}, "is 'phi', expected llama"),
    ({'timm_model_ids': ['other', 'tiny_siglip']}, 'timm_model_ids is .*other'),
    ({'image_sizes': [4]}, 'expected two numbers of pixels'),
    ({'image_sizes': [4, 6]}, 'joined patch by patch'),
    ({'image_resize_strategy': 'fold'}, "resized by 'fold'"),
    ({'n_action_bins': 1}, 'n_action_bins is 1, expected 2'),
    ({'n_action_bins': 4096}, '4096 bins need as many tokens'),
    ({'use_fused_vision_backbone': False}, 'expected two vision towers'),
    ({'norm_stats': []}, 'norm_stats is .*expected an object'),
  ],
)
def test_settings_that_are_not_supported_are_refused(
  tmp_path, changed, message
):
  (tmp_path / 'config.json').write_text(json.dumps(CONFIG | changed))
  with pytest.raises(weights.CheckpointError, match=message):
    openvla_files.read(tmp_path, towers=TOWERS)


def test_the_published_sizes_are_those_of_openvla_7b(tmp_path):
  published = CONFIG | {
    'timm_model_ids': [*openvla_files.TOWERS][:2],
    'image_sizes': [224, 224],
    'n_action_bins': 256,
    'pad_to_multiple_of': 64,
    'text_config': {
      'model_type': 'llama',
      'pad_token_id': 32000,
      'torch_dtype': 'bfloat16',
      'vocab_size': 32064,
    },
  }
  (tmp_path / 'config.json').write_text(json.dumps(published))
  config = openvla_files.read(tmp_path).config
  c = config.llama
  assert (c.D, c.L, c.H, c.F, c.V) == (4096, 32, 32, 11008, 32064)
  assert config.tokens.start == 31744 and config.dino.grid == 16
