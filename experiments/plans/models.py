"""Folders of the models and questions of recipes, as small as planning allows.

Planning reads a model's sizes and no weights. So a folder has the published
config.json, and a tokenizer with the printable characters of ASCII.
"""

import json
import pathlib

from stages.language import tokens

CHAT = '{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}'
PUBLISHED = pathlib.Path(__file__).parents[1] / 'compiled/models'


def qwen2(size: str, **changed) -> dict:
  """The config.json of a Qwen2.5, with what another model has in its place."""
  config = PUBLISHED / f'qwen2.5-{size}/config.json'
  return json.loads(config.read_text()) | changed


# Fields in which DeepSeek-R1-Distill-Qwen differs from Qwen2.5 of its size.
DISTILLED = {
  'rope_theta': 10000.0,
  'max_position_embeddings': 131072,
  'tie_word_embeddings': False,
}
# Of what is published, the fields that say how large a model is and what it
# computes.
CONFIGS = {
  'DeepSeek-R1-Distill-Qwen-1.5B': qwen2('1.5b', **DISTILLED),
  'DeepSeek-R1-Distill-Qwen-7B': qwen2('7b', **DISTILLED),
  'DeepSeek-R1-Distill-Qwen-32B': qwen2('32b', **DISTILLED),
  'Qwen2.5-7B': qwen2('7b', max_position_embeddings=131072),
  'Qwen2.5-32B': qwen2('32b', max_position_embeddings=131072),
  'Qwen3-30B-A3B-Base': {
    'architectures': ['Qwen3MoeForCausalLM'],
    'model_type': 'qwen3_moe',
    'hidden_act': 'silu',
    'rms_norm_eps': 1e-6,
    'rope_theta': 1e6,
    'max_position_embeddings': 32768,
    'tie_word_embeddings': False,
    'attention_bias': False,
    'torch_dtype': 'bfloat16',
    'vocab_size': 151936,
    'eos_token_id': 151643,
    'hidden_size': 2048,
    'intermediate_size': 6144,
    'moe_intermediate_size': 768,
    'num_hidden_layers': 48,
    'num_attention_heads': 32,
    'num_key_value_heads': 4,
    'head_dim': 128,
    'num_experts': 128,
    'num_experts_per_tok': 8,
    'norm_topk_prob': True,
    'decoder_sparse_step': 1,
    'mlp_only_layers': [],
    'router_aux_loss_coef': 0.001,
  },
}


def write(folder: pathlib.Path, model: str) -> dict[str, str]:
  """Writes what a recipe reads, unless the folder has it.

  Args:
    folder: of all models.
    model: a name of `CONFIGS`.

  Returns:
    The recipe's bindings of it.
  """
  path = folder / model
  if not (path / 'config.json').exists():
    path.mkdir(parents=True, exist_ok=True)
    texts = [''.join(map(chr, range(32, 127))) + '\n']
    tokenizer = tokens.train_tokenizer(path, texts, 100)
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(path)
    (path / 'config.json').write_text(json.dumps(CONFIGS[model], indent=2))
  bindings = {'MODEL': str(path)}
  for name, count in (('TRAIN', 512), ('EVAL', 30)):
    file = folder / f'{name.lower()}.jsonl'
    if not file.exists():
      rows = (
        {'prompt': f'{n}+1=?', 'answer': str(n + 1)} for n in range(count)
      )
      file.write_text('\n'.join(map(json.dumps, rows)))
    bindings[name] = str(file)
  return bindings
