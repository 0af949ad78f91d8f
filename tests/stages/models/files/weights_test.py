"""Loading and saving Hugging Face checkpoints."""

import json
import math
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import torch as st
import transformers

from sharding import mesh as meshes
from stages.language import huggingface
from stages.models.files import decoder_names, weights, weights_writer
import torch_reference

torch = torch_reference.torch
CASE = 'two queries per key, tied, linear'
UNTIED = 'four queries per key, untied, yarn'


def save(folder, case=CASE, dtype=torch.float32, **settings):
  """A checkpoint as `transformers` writes it, and its tensors."""
  model = torch_reference.model(case)
  state = {name: x.to(dtype) for name, x in model.state_dict().items()}
  if model.config.tie_word_embeddings:
    del state['lm_head.weight']
  other = transformers.Qwen2ForCausalLM(model.config).to(dtype)
  other.load_state_dict(state, strict=False)
  other.save_pretrained(folder, **settings)
  return state


def read(folder):
  return huggingface.load_params(folder, huggingface.load_config(folder))


def equal(got, want):
  jax.tree.map(np.testing.assert_array_equal, got, want)


def ours(state, config):
  """Our parameters, converted from the tensors by hand."""
  x = {name: np.asarray(x.float()) for name, x in state.items()}
  D, H, K, W = config.D, config.H, config.K, config.W

  def stack(name, *shape):
    """[outputs, inputs] of every layer, as [inputs, outputs]."""
    found = [x[f'model.layers.{i}.{name}'].T for i in range(config.L)]
    return np.stack([y.reshape(shape or y.shape) for y in found])

  params = {
    'embed_VD': x['model.embed_tokens.weight'],
    'norm_D': x['model.norm.weight'],
    'layers': {
      'query_DHW': stack('self_attn.q_proj.weight', D, H, W),
      'key_DKW': stack('self_attn.k_proj.weight', D, K, W),
      'value_DKW': stack('self_attn.v_proj.weight', D, K, W),
      'out_HWD': stack('self_attn.o_proj.weight', H, W, D),
      'query_bias_HW': stack('self_attn.q_proj.bias', H, W),
      'key_bias_KW': stack('self_attn.k_proj.bias', K, W),
      'value_bias_KW': stack('self_attn.v_proj.bias', K, W),
      'gate_DF': stack('mlp.gate_proj.weight'),
      'up_DF': stack('mlp.up_proj.weight'),
      'down_FD': stack('mlp.down_proj.weight'),
      'before_attention_D': stack('input_layernorm.weight'),
      'before_feedforward_D': stack('post_attention_layernorm.weight'),
    },
  }
  if not config.tie_embeddings:
    params['unembed_DV'] = x['lm_head.weight'].T
  return params


@pytest.mark.parametrize('case', [CASE, UNTIED])
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_one_file_and_many_read_bit_for_bit(case, dtype, tmp_path):
  stored = getattr(torch, dtype)
  state = save(tmp_path / 'one', case, stored)
  save(tmp_path / 'many', case, stored, max_shard_size='5KB')
  assert len(list((tmp_path / 'one').glob('*.safetensors'))) == 1
  assert len(list((tmp_path / 'many').glob('*.safetensors'))) > 3
  config = huggingface.load_config(tmp_path / 'one')
  assert config.dtype == dtype
  for folder in 'one', 'many':
    got = read(tmp_path / folder)
    # Parameters are stored in float32, for any type of the arithmetic.
    assert {x.dtype for x in jax.tree.leaves(got)} == {jnp.dtype('float32')}
    equal(got, ours(state, config))


@pytest.mark.parametrize('case', [CASE, UNTIED])
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('shard_bytes', [None, 5000])
def test_written_files_hold_the_tensors_that_were_read(
  case, dtype, shard_bytes, tmp_path
):
  state = save(tmp_path / 'theirs', case, getattr(torch, dtype))
  folder = tmp_path / 'ours'
  weights_writer.save(
    folder,
    read(tmp_path / 'theirs'),
    decoder_names.NAMES,
    dtype=dtype,
    shard_bytes=shard_bytes,
  )
  files = sorted(folder.glob('*.safetensors'))
  if shard_bytes is None:
    assert [file.name for file in files] == [weights.SINGLE]
    assert not (folder / weights.INDEX).exists()
  else:
    assert len(files) > 3
  got = {}
  for file in files:
    tensors = st.load_file(file)
    bytes_ = sum(x.nbytes for x in tensors.values())
    assert not shard_bytes or bytes_ <= shard_bytes or len(tensors) == 1
    got |= tensors
  assert got.keys() == state.keys()
  for name, x in state.items():
    assert got[name].dtype == x.dtype
    assert torch.equal(got[name], x), name
  # `transformers` finds all tensors and computes the same logits.
  (folder / 'config.json').write_bytes(
    (tmp_path / 'theirs' / 'config.json').read_bytes()
  )
  model, info = transformers.Qwen2ForCausalLM.from_pretrained(
    folder, output_loading_info=True
  )
  assert not any(info.values())
  token = torch.arange(6)[None]
  was = transformers.Qwen2ForCausalLM.from_pretrained(tmp_path / 'theirs')
  with torch.no_grad():
    assert torch.equal(model(token).logits, was(token).logits)


def test_tensors_are_those_of_the_file_in_numpy_and_torch(tmp_path):
  save(tmp_path)
  params = read(tmp_path)
  want = st.load_file(tmp_path / weights.SINGLE)
  for convert in (np.asarray, torch.from_dlpack):
    got = dict(
      weights.checkpoint_tensors(
        jax.tree.map(convert, params), decoder_names.NAMES
      )
    )
    assert got.keys() == want.keys()
    for name, tensor in want.items():
      np.testing.assert_array_equal(got[name], tensor, err_msg=name)


def test_one_file_replaces_many(tmp_path):
  save(tmp_path)
  params = read(tmp_path)
  weights_writer.save(tmp_path, params, decoder_names.NAMES, shard_bytes=5000)
  weights_writer.save(
    tmp_path, jax.tree.map(jnp.zeros_like, params), decoder_names.NAMES
  )
  assert not any(x.any() for x in jax.tree.leaves(read(tmp_path)))


@pytest.fixture(scope='module')
def even(tmp_path_factory):
  """A checkpoint whose dimensions divide among eight devices."""
  folder = tmp_path_factory.mktemp('even')
  torch.manual_seed(0)
  transformers.Qwen2ForCausalLM(
    transformers.Qwen2Config(
      vocab_size=64,
      hidden_size=32,
      num_hidden_layers=3,
      num_attention_heads=8,
      num_key_value_heads=2,
      head_dim=6,
      intermediate_size=40,
    )
  ).save_pretrained(folder)
  return folder


MESHES = {
  'data': {'data': 8},
  'fsdp': {'fsdp': 8},
  'fsdp and tensor': {'fsdp': 4, 'tensor': 2},
  'all': {'data': 2, 'fsdp': 2, 'tensor': 2},
}
# Number of parts into which each axis cuts of these arrays.
CUT = {
  'embed_VD': ('tensor', 'fsdp'),
  'unembed_DV': ('fsdp', 'tensor'),
  'norm_D': ('fsdp',),
  'before_attention_D': ('fsdp',),
  'before_feedforward_D': ('fsdp',),
  'query_DHW': ('fsdp', 'tensor'),
  'key_DKW': ('fsdp', 'tensor'),
  'value_DKW': ('fsdp', 'tensor'),
  'out_HWD': ('tensor', 'fsdp'),
  'query_bias_HW': ('tensor',),
  'key_bias_KW': ('tensor',),
  'value_bias_KW': ('tensor',),
  'gate_DF': ('fsdp', 'tensor'),
  'up_DF': ('fsdp', 'tensor'),
  'down_FD': ('tensor', 'fsdp'),
}


@pytest.mark.parametrize('axes', MESHES.values(), ids=MESHES)
def test_each_device_reads_its_part_and_no_more(axes, even, monkeypatch):
  want, open_slice, taken = read(even), weights.TensorFiles.slice, {}

  class Spy:
    """Records the largest part of a tensor that is read at once."""

    def __init__(self, stored, name):
      self.stored, self.name = stored, name

    def get_shape(self):
      return self.stored.get_shape()

    def get_dtype(self):
      return self.stored.get_dtype()

    def __getitem__(self, index):
      part = self.stored[index]
      share = part.size / math.prod(self.get_shape())
      taken[self.name] = max(taken.get(self.name, 0), share)
      return part

  def spy(files, name):
    return Spy(open_slice(files, name), name)

  monkeypatch.setattr(weights.TensorFiles, 'slice', spy)
  with jax.set_mesh(meshes.mesh(jax.devices(), axes)):
    got = read(even)
  equal(got, want)

  def check(path, x):
    name = path[-1].key
    parts = math.prod(axes.get(axis, 1) for axis in CUT[name])
    for shard in x.addressable_shards:
      assert shard.data.size == x.size // parts, name
    assert {shard.device for shard in x.addressable_shards} == set(
      jax.devices()
    )
    tensor = decoder_names.NAMES[name].name
    for i in range(3 if '{i}' in tensor else 1):
      assert taken[tensor.format(i=i)] == 1 / parts, name

  jax.tree_util.tree_map_with_path(check, got)


def refuse(folder, words):
  with pytest.raises(weights.CheckpointError, match=words) as caught:
    read(folder)
  return str(caught.value)


def test_one_error_names_all_that_is_wrong(tmp_path):
  state = save(tmp_path)
  del state['model.norm.weight']
  del state['model.layers.1.mlp.up_proj.weight']
  state['model.layers.2.mlp.up_proj.weight'] = torch.zeros(29, 20)
  state['visual.patch.weight'] = torch.zeros(2)
  state['model.layers.0.self_attn.k_proj.bias'] = torch.zeros(5)
  state['model.embed_tokens.weight'] = torch.zeros(97, 21)
  st.save_file(state, tmp_path / weights.SINGLE)
  assert refuse(tmp_path, 'does not hold the model') == (
    f'{tmp_path} does not hold the model that its config.json describes: '
    'missing model.layers.1.mlp.up_proj.weight; '
    'missing model.norm.weight; '
    'extra model.layers.2.mlp.up_proj.weight; '
    'extra visual.patch.weight; '
    'model.embed_tokens.weight is [97, 21], expected [97, 20]; '
    'model.layers.0.self_attn.k_proj.bias is [5], expected [12].'
  )


def test_a_second_copy_of_a_tied_embedding_is_left_alone(tmp_path):
  state = save(tmp_path)
  want = read(tmp_path)
  state['lm_head.weight'] = state['model.embed_tokens.weight'].clone()
  st.save_file(state, tmp_path / weights.SINGLE)
  equal(read(tmp_path), want)


def test_an_untied_model_without_its_output_layer_is_refused(tmp_path):
  state = save(tmp_path, UNTIED)
  del state['lm_head.weight']
  st.save_file(state, tmp_path / weights.SINGLE)
  refuse(tmp_path, 'missing lm_head.weight')


def test_a_folder_without_tensors_is_refused(tmp_path):
  save(tmp_path)
  (tmp_path / weights.SINGLE).unlink()
  refuse(tmp_path, 'holds neither model.safetensors nor model.safetensors.ind')


def test_a_file_cut_short_is_refused(tmp_path):
  save(tmp_path)
  file = tmp_path / weights.SINGLE
  whole = file.read_bytes()
  for size in len(whole) - 100, 1000, 4, 0:
    file.write_bytes(whole[:size])
    refuse(tmp_path, 'model.safetensors cannot be read .* copy it again')


def test_an_absent_file_of_many_is_refused(tmp_path):
  save(tmp_path, max_shard_size='10KB')
  absent = sorted(tmp_path.glob('*.safetensors'))[1]
  absent.unlink()
  refuse(tmp_path, f"lacks .'{absent.name}'.*copy the checkpoint again")


@pytest.mark.parametrize(
  'index', ['{"weight_map": {', '{"metadata": {}}', '[]']
)
def test_a_broken_index_is_refused(index, tmp_path):
  save(tmp_path, max_shard_size='10KB')
  (tmp_path / weights.INDEX).write_text(index)
  refuse(tmp_path, 'model.safetensors.index.json .* copy it again')


@pytest.mark.parametrize(
  'name', ['../model.safetensors', '/etc/passwd', 'a/b.safetensors', 3]
)
def test_an_index_that_leaves_its_folder_is_refused(name, tmp_path):
  save(tmp_path, max_shard_size='10KB')
  index = json.loads((tmp_path / weights.INDEX).read_text())
  index['weight_map'] = dict.fromkeys(index['weight_map'], name)
  (tmp_path / weights.INDEX).write_text(json.dumps(index))
  refuse(tmp_path, 'not files of its own folder')


def test_a_pipe_in_place_of_a_file_is_refused_and_not_waited_for(tmp_path):
  save(tmp_path)
  (tmp_path / weights.SINGLE).unlink()
  os.mkfifo(tmp_path / weights.SINGLE)
  refuse(tmp_path, 'holds neither')


def test_tensors_that_are_not_floating_point_are_refused(tmp_path):
  state = save(tmp_path)
  state['model.norm.weight'] = torch.ones(20, dtype=torch.int64)
  st.save_file(state, tmp_path / weights.SINGLE)
  refuse(tmp_path, 'model.norm.weight is of type I64, expected one of')


@pytest.mark.parametrize('bad', [float('nan'), float('inf'), float('-inf')])
def test_a_weight_that_is_not_finite_is_refused_by_its_name(bad, tmp_path):
  state = save(tmp_path)
  name = 'model.layers.1.mlp.up_proj.weight'
  state[name] = state[name].clone()
  state[name][3, 2] = bad
  st.save_file(state, tmp_path / weights.SINGLE)
  refuse(tmp_path, 'layers.1.mlp.up_proj.weight of .* are NaN or infinite')


def test_an_error_does_not_name_a_million_tensors(tmp_path):
  state = save(tmp_path)
  state |= {f'more.{i}': torch.zeros(1) for i in range(100)}
  st.save_file(state, tmp_path / weights.SINGLE)
  assert refuse(tmp_path, 'does not hold').endswith('; and 50 more.')


def test_the_index_says_where_and_how_much(tmp_path):
  save(tmp_path / 'theirs')
  params = read(tmp_path / 'theirs')
  weights_writer.save(tmp_path, params, decoder_names.NAMES, shard_bytes=5000)
  index = json.loads((tmp_path / weights.INDEX).read_text())
  assert set(index['weight_map'].values()) == {
    file.name for file in tmp_path.glob('*.safetensors')
  }
  size = sum(x.nbytes for x in jax.tree.leaves(params))
  assert index['metadata']['total_size'] == size
