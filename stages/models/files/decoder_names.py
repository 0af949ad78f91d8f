"""Checkpoint tensors of decoders, by parameter."""

from stages.models.files.naming import Tensor

LAYER = 'model.layers.{i}'
# Those of Llama; `families.Family.renamed` has the exceptions.
NAMES = {
  'embed_VD': Tensor('model.embed_tokens.weight'),
  'unembed_DV': Tensor('lm_head.weight', 1),
  'norm_D': Tensor('model.norm.weight'),
  'before_attention_D': Tensor(f'{LAYER}.input_layernorm.weight'),
  'before_feedforward_D': Tensor(f'{LAYER}.post_attention_layernorm.weight'),
  'query_DHW': Tensor(f'{LAYER}.self_attn.q_proj.weight', 1),
  'key_DKW': Tensor(f'{LAYER}.self_attn.k_proj.weight', 1),
  'value_DKW': Tensor(f'{LAYER}.self_attn.v_proj.weight', 1),
  'out_HWD': Tensor(f'{LAYER}.self_attn.o_proj.weight', 2),
  'query_bias_HW': Tensor(f'{LAYER}.self_attn.q_proj.bias', 0),
  'key_bias_KW': Tensor(f'{LAYER}.self_attn.k_proj.bias', 0),
  'value_bias_KW': Tensor(f'{LAYER}.self_attn.v_proj.bias', 0),
  'out_bias_D': Tensor(f'{LAYER}.self_attn.o_proj.bias', 0),
  'query_norm_W': Tensor(f'{LAYER}.self_attn.q_norm.weight'),
  'key_norm_W': Tensor(f'{LAYER}.self_attn.k_norm.weight'),
  'gate_DF': Tensor(f'{LAYER}.mlp.gate_proj.weight', 1),
  'up_DF': Tensor(f'{LAYER}.mlp.up_proj.weight', 1),
  'down_FD': Tensor(f'{LAYER}.mlp.down_proj.weight', 1),
}
POST_NORMS = {
  'after_attention_D': Tensor(f'{LAYER}.post_attention_layernorm.weight'),
  'before_feedforward_D': Tensor(f'{LAYER}.pre_feedforward_layernorm.weight'),
  'after_feedforward_D': Tensor(f'{LAYER}.post_feedforward_layernorm.weight'),
}
EXPERTS = {
  'router_DE': Tensor(f'{LAYER}.mlp.gate.weight', 1),
  'gate_EDF': Tensor(f'{LAYER}.mlp.experts.{{e}}.gate_proj.weight', 1),
  'up_EDF': Tensor(f'{LAYER}.mlp.experts.{{e}}.up_proj.weight', 1),
  'down_EFD': Tensor(f'{LAYER}.mlp.experts.{{e}}.down_proj.weight', 1),
}
