"""Models in GGUF, against `transformers` and a chat with one."""

import importlib

import gguf
import jax
import numpy as np
import pytest
import torch
import transformers

from rlinf_jax import chat
from rlinf_jax.prepare import gguf_model
from stages.language import tokens
from stages.models.files import weights

TEMPLATE = (
  '{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>'
  '{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant {% endif %}'
)
SPECIAL = ['<|endoftext|>', '<|im_start|>', '<|im_end|>']
SIZES = {
  'hidden_size': 64,
  'intermediate_size': 96,
  'num_hidden_layers': 2,
  'num_attention_heads': 4,
  'num_key_value_heads': 2,
  'rope_theta': 1e5,
  'max_position_embeddings': 256,
  'rms_norm_eps': 1e-5,
}

# `transformers` also has a function of this name, once something has used it.
convert_slow_tokenizer = importlib.import_module(
  'transformers.convert_slow_tokenizer'
)


def vocabulary():
  """Special tokens, all bytes and some merges."""
  alphabet = sorted(convert_slow_tokenizer.bytes_to_unicode().values())
  merges = ['Ġ t', 'h e', 'Ġt he', 'a n', 'i n', '1 2']
  merged = [merge.replace(' ', '') for merge in merges]
  return [*SPECIAL, *alphabet, *merged], merges


def reference(kind, tied=True):
  """A random model of `transformers`."""
  torch.manual_seed(0)
  config = transformers.CONFIG_MAPPING[kind](
    vocab_size=len(vocabulary()[0]),
    tie_word_embeddings=tied,
    bos_token_id=1,
    eos_token_id=2,
    head_dim=16,
    initializer_range=0.2,
    **SIZES,
  )
  return transformers.AutoModelForCausalLM.from_config(config).eval()


def interleaved(x, heads):
  """Channels of a head as llama.cpp stores them: the halves, alternating."""
  halves = x.reshape(heads, 2, -1, *x.shape[1:])
  return halves.swapaxes(1, 2).reshape(x.shape)


def write(file, model, quantized=None):
  """Writes a model as GGUF."""
  kind = model.config.model_type
  writer = gguf.GGUFWriter(file, kind)
  writer.add_block_count(SIZES['num_hidden_layers'])
  writer.add_context_length(SIZES['max_position_embeddings'])
  writer.add_embedding_length(SIZES['hidden_size'])
  writer.add_feed_forward_length(SIZES['intermediate_size'])
  writer.add_head_count(SIZES['num_attention_heads'])
  writer.add_head_count_kv(SIZES['num_key_value_heads'])
  writer.add_key_length(16)
  writer.add_layer_norm_rms_eps(SIZES['rms_norm_eps'])
  writer.add_rope_freq_base(SIZES['rope_theta'])
  names, merges = vocabulary()
  writer.add_tokenizer_model('gpt2')
  writer.add_tokenizer_pre('smollm')
  writer.add_token_list(names)
  writer.add_token_types([3] * len(SPECIAL) + [1] * (len(names) - len(SPECIAL)))
  writer.add_token_merges(merges)
  writer.add_bos_token_id(1)
  writer.add_eos_token_id(2)
  writer.add_chat_template(TEMPLATE)
  theirs = {
    ours: name for name, ours in (gguf_model.LAYER | gguf_model.OUTSIDE).items()
  }
  for key, tensor in model.state_dict().items():
    if key == 'lm_head.weight' and model.config.tie_word_embeddings:
      continue
    stem, _, end = key.rpartition('.')
    prefix = ''
    if stem.startswith('model.layers.'):
      _, _, layer, stem = stem.split('.', 3)
      prefix = f'blk.{layer}.'
    x = tensor.numpy()
    if kind == 'llama' and stem in ('self_attn.q_proj', 'self_attn.k_proj'):
      which = 'attention' if stem.endswith('q_proj') else 'key_value'
      x = interleaved(x, SIZES[f'num_{which}_heads'])
    name = f'{prefix}{theirs[stem]}.{end}'
    if quantized and x.ndim == 2:
      x = gguf.quantize(x, quantized)
      writer.add_tensor(name, x, raw_dtype=quantized)
    else:
      writer.add_tensor(name, np.ascontiguousarray(x, np.float32))
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()


@pytest.mark.parametrize(
  'kind, tied',
  [('llama', True), ('llama', False), ('qwen2', True), ('qwen3', False)],
)
def test_the_folder_is_the_model_of_transformers(tmp_path, kind, tied):
  model = reference(kind, tied)
  write(tmp_path / 'model.gguf', model)
  gguf_model.convert(tmp_path / 'model.gguf', tmp_path / 'model')
  got = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / 'model')
  want = model.state_dict()
  assert got.state_dict().keys() == want.keys()
  for name, x in got.state_dict().items():
    torch.testing.assert_close(x, want[name], rtol=0, atol=0)
  ids = torch.arange(4, 24)[None]
  torch.testing.assert_close(got(ids).logits, model(ids).logits)


def test_quantized_weights_are_expanded(tmp_path, monkeypatch):
  model, kind = reference('llama'), gguf.GGMLQuantizationType.Q8_0
  write(tmp_path / 'model.gguf', model, quantized=kind)
  # In several files, as a large model is written.
  monkeypatch.setattr(gguf_model, 'SHARD_BYTES', 50_000)
  gguf_model.convert(tmp_path / 'model.gguf', tmp_path / 'model')
  assert len([*(tmp_path / 'model').glob('*.safetensors')]) > 1
  got = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / 'model')
  for name, x in model.state_dict().items():
    error = (got.state_dict()[name] - x).abs().max()
    assert error <= x.abs().max() / 127


def test_the_tokenizer_keeps_special_tokens_digits_and_the_chat_template(
  tmp_path,
):
  write(tmp_path / 'model.gguf', reference('llama'))
  gguf_model.convert(tmp_path / 'model.gguf', tmp_path / 'model')
  tokenizer = tokens.load_tokenizer(str(tmp_path / 'model'))
  text = 'the  ten in 12\nä<|im_end|>'
  ids = tokenizer(text)['input_ids']
  assert tokenizer.decode(ids) == text
  assert ids[-1] == tokenizer.eos_token_id == 2
  pieces = tokenizer.convert_ids_to_tokens(ids)
  assert pieces[:2] == ['t', 'he'] and '12' not in pieces  # A digit at a time.
  messages = [{'role': 'user', 'content': 'the'}]
  assert tokenizer.apply_chat_template(
    messages, tokenize=False, add_generation_prompt=True
  ) == ('<|im_start|>user the<|im_end|><|im_start|>assistant ')


def test_a_chat_answers_as_transformers_does_and_remembers(tmp_path):
  write(tmp_path / 'model.gguf', reference('llama'))
  folder = str(tmp_path / 'model')
  gguf_model.convert(tmp_path / 'model.gguf', folder)
  model = transformers.AutoModelForCausalLM.from_pretrained(folder)
  there = chat.Chat(folder, length=6)
  messages = []
  lines = ['the ten', 'in 12', '', 'never read']
  answers = chat.converse(there, lines, None, jax.random.key(0))
  for line, answer in zip(lines[:2], answers, strict=True):
    messages.append({'role': 'user', 'content': line})
    ids = there.tokenizer.apply_chat_template(
      messages,
      add_generation_prompt=True,
      return_tensors='pt',
      return_dict=False,
    )
    out = model.generate(
      ids, max_new_tokens=6, do_sample=False, pad_token_id=0
    )[0, ids.shape[1] :]
    want = there.tokenizer.decode(out, skip_special_tokens=True).strip()
    assert answer == want
    messages.append({'role': 'assistant', 'content': answer})


@pytest.mark.parametrize(
  'key, value, match',
  [
    ('general.architecture', 'mamba', "of architecture 'mamba'; llama, qwen"),
    ('llama.rope.scaling.type', 'yarn', 'scales its rotary embedding'),
    ('tokenizer.ggml.model', 'llama', "of type 'llama'; byte-level BPE"),
    ('tokenizer.ggml.pre', 'viking', "splits text as 'viking'; gpt-2, smol"),
  ],
)
def test_what_is_not_supported_is_refused(
  tmp_path, monkeypatch, key, value, match
):
  write(tmp_path / 'model.gguf', reference('llama'))
  opened = gguf_model._open

  class Field(str):
    contents = str.__str__

  def changed(file):
    reader = opened(file)
    reader.fields[key] = Field(value)
    return reader

  monkeypatch.setattr(gguf_model, '_open', changed)
  with pytest.raises(weights.CheckpointError, match=match):
    gguf_model.convert(tmp_path / 'model.gguf', tmp_path / 'model')
  assert not (tmp_path / 'model').exists()


def test_files_that_are_no_models_are_refused(tmp_path, capsys):
  (tmp_path / 'model.gguf').write_bytes(b'GGML' + bytes(64))
  for file, match in [
    (tmp_path / 'model.gguf', 'cannot be read as GGUF .* copy it again'),
    (tmp_path / 'none.gguf', 'There is no file'),
    ('no_such_package', 'no_such_package is not installed'),
  ]:
    with pytest.raises(weights.CheckpointError, match=match):
      gguf_model.main(str(file), str(tmp_path / 'model'))
  assert not capsys.readouterr().out
