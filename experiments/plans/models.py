"""Folders of the models and questions of recipes, as small as planning allows.

Planning reads a model's sizes and no weights. So a folder has the published
config.json, and a tokenizer with the printable characters of ASCII.
"""

import json
import pathlib

from stages.language import tokens

CHAT = '{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}'
QWEN2 = {
  'architectures': ['Qwen2ForCausalLM'],
  'model_type': 'qwen2',
  'hidden_act': 'silu',
  'rms_norm_eps': 1e-6,
  'rope_theta': 10000.0,
  'max_position_embeddings': 131072,
  'use_sliding_window': False,
  'torch_dtype': 'bfloat16',
  'tie_word_embeddings': False,
  'vocab_size': 152064,
  'eos_token_id': 151643,
}
B7 = QWEN2 | {
  'hidden_size': 3584,
  'intermediate_size': 18944,
  'num_hidden_layers': 28,
  'num_attention_heads': 28,
  'num_key_value_heads': 4,
}
B32 = QWEN2 | {
  'hidden_size': 5120,
  'intermediate_size': 27648,
  'num_hidden_layers': 64,
  'num_attention_heads': 40,
  'num_key_value_heads': 8,
}
# Of what is published, the fields that say how large a model is and what it
# computes.
CONFIGS = {
  'DeepSeek-R1-Distill-Qwen-1.5B': QWEN2
  | {
    'hidden_size': 1536,
    'intermediate_size': 8960,
    'num_hidden_layers': 28,
    'num_attention_heads': 12,
    'num_key_value_heads': 2,
    'vocab_size': 151936,
  },
  'DeepSeek-R1-Distill-Qwen-7B': B7,
  'DeepSeek-R1-Distill-Qwen-32B': B32,
  'Qwen2.5-7B': B7 | {'rope_theta': 1e6},
  'Qwen2.5-32B': B32 | {'rope_theta': 1e6},
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
