"""Models in GGUF, the format of llama.cpp, as Hugging Face checkpoints.

  python -m rlinf_jax.prepare.gguf_model MODEL FOLDER

MODEL is a file, or an installed Python package that brings one. Quantized
weights are expanded once. Everything else reads the folder: training, a chat,
vLLM, and the export of trained weights.
"""

import importlib.util
import json
import pathlib
import re
import shutil
from typing import Any

import numpy as np

from rlinf_jax import command_line, startup
from rlinf_jax.prepare import gguf_tokenizer
from stages.models import families
from stages.models.files import weights

SHARD_BYTES = 2**32  # Of a file with tensors.
# Names in GGUF of an architecture's tensors, and of those in Hugging Face.
LAYER = {
  'attn_norm': 'input_layernorm',
  'ffn_norm': 'post_attention_layernorm',
  'attn_q': 'self_attn.q_proj',
  'attn_k': 'self_attn.k_proj',
  'attn_v': 'self_attn.v_proj',
  'attn_output': 'self_attn.o_proj',
  'attn_q_norm': 'self_attn.q_norm',
  'attn_k_norm': 'self_attn.k_norm',
  'ffn_gate': 'mlp.gate_proj',
  'ffn_up': 'mlp.up_proj',
  'ffn_down': 'mlp.down_proj',
}
OUTSIDE = {
  'token_embd': 'model.embed_tokens',
  'output_norm': 'model.norm',
  'output': 'lm_head',
}
ARCHITECTURES = ('llama', 'qwen2', 'qwen3')


def packaged(package: str) -> str:
  """The GGUF file that an installed Python package brings.

  Raises:
    CheckpointError: if it is not installed, or has no such file, or several.
  """
  found = importlib.util.find_spec(package)
  folders = (found and found.submodule_search_locations) or []
  files = sorted(
    file for folder in folders for file in pathlib.Path(folder).glob('*.gguf')
  )
  if len(files) != 1:
    problem = f'has {len(files)} GGUF files' if found else 'is not installed'
    raise weights.CheckpointError(
      f'The package {package} {problem}, and one file is needed.'
    )
  return str(files[0])


def convert(
  file: str | pathlib.Path,
  folder: str | pathlib.Path,
  *,
  dtype: str = 'float32',
):
  """Writes the model of a GGUF file as a Hugging Face checkpoint.

  Args:
    file: the model, of an architecture in `ARCHITECTURES`.
    folder: where to write.
    dtype: type of the weights that are written.

  Raises:
    CheckpointError: if the file is no model that is supported.
    ImportError: if the package `gguf` is not installed.
  """
  reader = _open(file)
  fields = {key: field.contents() for key, field in reader.fields.items()}
  folder = pathlib.Path(folder)
  part = folder.with_name(f'{folder.name}.part')
  shutil.rmtree(part, ignore_errors=True)
  part.mkdir(parents=True)
  names = {tensor.name for tensor in reader.tensors}
  config = _config(fields, names, file) | {'dtype': dtype}
  families.read(config, file)
  (part / 'config.json').write_text(json.dumps(config, indent=2))
  gguf_tokenizer.write(part, fields, file)
  _write_tensors(part, reader.tensors, config, dtype, file)
  shutil.rmtree(folder, ignore_errors=True)
  part.replace(folder)


def _open(file):
  try:
    import gguf
  except ImportError as error:
    raise ImportError(
      'Reading GGUF needs the package gguf: pip install "rlinf-jax[gguf]".'
    ) from error
  if pathlib.Path(file).is_dir():
    raise weights.CheckpointError(f'{file} is a folder: name the file in it.')
  if not pathlib.Path(file).is_file():
    raise weights.CheckpointError(f'There is no file {file}.')
  try:
    return gguf.GGUFReader(file)
  except (ValueError, IndexError, KeyError) as error:
    raise weights.CheckpointError(
      f'{file} cannot be read as GGUF ({error}): copy it again.'
    ) from error


def _config(fields: dict[str, Any], tensors: set[str], file) -> dict[str, Any]:
  """The config.json of a model, from the metadata of its file."""
  kind = fields.get('general.architecture')
  if kind not in ARCHITECTURES:
    raise weights.CheckpointError(
      f'{file} is a model of architecture {kind!r}; '
      f'{", ".join(ARCHITECTURES)} are supported.'
    )
  scaling = fields.get(f'{kind}.rope.scaling.type', 'none')
  if scaling != 'none' or 'rope_freqs.weight' in tensors:
    raise weights.CheckpointError(
      f'{file} scales its rotary embedding, which is not supported for GGUF.'
    )

  def read(key, default=None):
    value = fields.get(f'{kind}.{key}', default)
    if value is None:
      raise weights.CheckpointError(f'{file} lacks {kind}.{key}.')
    return value

  heads = read('attention.head_count')
  width = read('embedding_length')
  return {
    'model_type': kind,
    'architectures': [families.FAMILIES[kind].architecture],
    'vocab_size': len(fields['tokenizer.ggml.tokens']),
    'hidden_size': width,
    'num_hidden_layers': read('block_count'),
    'num_attention_heads': heads,
    'num_key_value_heads': read('attention.head_count_kv', heads),
    'head_dim': read('attention.key_length', width // heads),
    'intermediate_size': read('feed_forward_length'),
    'rms_norm_eps': read('attention.layer_norm_rms_epsilon'),
    'rope_theta': read('rope.freq_base', 10000.0),
    'max_position_embeddings': read('context_length'),
    'tie_word_embeddings': 'output.weight' not in tensors,
    'hidden_act': 'silu',
    'bos_token_id': fields.get('tokenizer.ggml.bos_token_id'),
    'eos_token_id': fields.get('tokenizer.ggml.eos_token_id'),
  }


def _name(name: str, file) -> str:
  """The name in Hugging Face of a tensor of a GGUF file."""
  stem, _, end = name.rpartition('.')
  found = re.fullmatch(r'blk\.(\d+)\.(\w+)', stem)
  if found and found[2] in LAYER:
    return f'model.layers.{found[1]}.{LAYER[found[2]]}.{end}'
  if stem in OUTSIDE:
    return f'{OUTSIDE[stem]}.{end}'
  raise weights.CheckpointError(
    f'{file} has a tensor {name!r}, which is unknown.'
  )


def _write_tensors(folder, tensors, config, dtype, file):
  """Writes expanded tensors, in several files if there are many."""
  import gguf
  import ml_dtypes
  from safetensors import numpy as safetensors

  dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
  shards, size = [{}], 0
  for tensor in tensors:
    count = int(tensor.n_elements) * dtype.itemsize
    if shards[-1] and size + count > SHARD_BYTES:
      shards, size = [*shards, {}], 0
    shards[-1][_name(tensor.name, file)] = tensor
    size += count
  file_of = {}
  for n, shard in enumerate(shards):
    name = weights.SINGLE
    if len(shards) > 1:
      name = f'model-{n + 1:05d}-of-{len(shards):05d}.safetensors'
    expanded = {}
    for key, tensor in shard.items():
      x = gguf.dequantize(tensor.data, tensor.tensor_type)
      x = _unpermuted(tensor.name, x, config)
      expanded[key] = np.ascontiguousarray(x, dtype)
    safetensors.save_file(expanded, folder / name, metadata={'format': 'pt'})
    file_of |= dict.fromkeys(shard, name)
  if len(shards) > 1:
    index = {'metadata': {}, 'weight_map': file_of}
    (folder / weights.INDEX).write_text(json.dumps(index, indent=2))


def _unpermuted(name: str, x: np.ndarray, config) -> np.ndarray:
  """A tensor as in Hugging Face.

  For Llama, llama.cpp rotates neighboring pairs of a head's channels, where
  Hugging Face rotates its halves: its queries and keys are reordered.
  """
  found = re.fullmatch(r'blk\.\d+\.attn_([qk])\.(weight|bias)', name)
  if config['model_type'] != 'llama' or not found:
    return x
  heads = config[
    'num_attention_heads' if found[1] == 'q' else 'num_key_value_heads'
  ]
  pairs = x.reshape(heads, -1, 2, *x.shape[1:])
  return pairs.swapaxes(1, 2).reshape(x.shape)


def main(model: str, folder: str):
  """Converts the model that the command line names."""
  is_package = model.isidentifier() and not pathlib.Path(model).exists()
  convert(packaged(model) if is_package else model, folder)
  print(f'The model is in {folder}.')


if __name__ == '__main__':
  with startup.ended():
    command_line.run(main, 'MODEL', 'FOLDER')
