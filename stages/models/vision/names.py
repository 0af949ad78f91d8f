"""Tensors of published vision transformers, by parameter.

Three layouts hold the same models: `transformers` has one for DINOv2 with
registers and one for SigLIP, and timm has one for both, in which queries, keys
and values are one matrix.
"""

from collections.abc import Mapping

from stages.models.files import weights
from stages.models.files.naming import Tensor
from stages.models.vision import vit

_DINO_LAYER = 'encoder.layer.{i}'
_SIGLIP_LAYER = 'encoder.layers.{i}'
_TIMM_LAYER = 'blocks.{i}'


def _pair(weight: str, bias: str, name: str, inputs: int | None):
  """Weight and bias of a linear map, or of a LayerNorm if `inputs` is None."""
  vector = None if inputs is None else 0
  return {weight: Tensor(f'{name}.weight', inputs)} | {
    bias: Tensor(f'{name}.bias', vector)
  }


def _layer(norms, heads, out: str, feedforward) -> dict[str, Tensor]:
  """Parameters of a layer, by the names of its modules."""
  kinds = zip(('query', 'key', 'value'), heads, strict=True)
  found = {}
  for kind, name in kinds:
    found |= _pair(f'{kind}_DHW', f'{kind}_bias_HW', name, 1)
  found |= _pair('out_HWD', 'out_bias_D', out, 2)
  found |= _pair('up_DF', 'up_bias_F', feedforward[0], 1)
  found |= _pair('down_FD', 'down_bias_D', feedforward[1], 1)
  for norm, name in zip(('attention', 'feedforward'), norms, strict=True):
    found |= _pair(f'before_{norm}_D', f'before_{norm}_bias_D', name, None)
  return found


# Files of `Dinov2WithRegistersModel` of transformers, which renames them in
# memory.
DINOV2 = {
  'patch_DOUU': Tensor('embeddings.patch_embeddings.projection.weight'),
  'patch_bias_D': Tensor('embeddings.patch_embeddings.projection.bias'),
  'position_PD': Tensor('embeddings.position_embeddings', ones=1),
  'class_ID': Tensor('embeddings.cls_token', ones=1),
  'register_GD': Tensor('embeddings.register_tokens', ones=1),
  'attention_scale_D': Tensor(f'{_DINO_LAYER}.layer_scale1.lambda1'),
  'feedforward_scale_D': Tensor(f'{_DINO_LAYER}.layer_scale2.lambda1'),
  **_pair('norm_D', 'norm_bias_D', 'layernorm', None),
  **_layer(
    (f'{_DINO_LAYER}.norm1', f'{_DINO_LAYER}.norm2'),
    [
      f'{_DINO_LAYER}.attention.attention.{kind}'
      for kind in ('query', 'key', 'value')
    ],
    f'{_DINO_LAYER}.attention.output.dense',
    (f'{_DINO_LAYER}.mlp.fc1', f'{_DINO_LAYER}.mlp.fc2'),
  ),
}
# `SiglipVisionModel` of transformers.
SIGLIP = {
  'patch_DOUU': Tensor('embeddings.patch_embedding.weight'),
  'patch_bias_D': Tensor('embeddings.patch_embedding.bias'),
  'position_PD': Tensor('embeddings.position_embedding.weight'),
  **_pair('norm_D', 'norm_bias_D', 'post_layernorm', None),
  **_layer(
    (f'{_SIGLIP_LAYER}.layer_norm1', f'{_SIGLIP_LAYER}.layer_norm2'),
    [f'{_SIGLIP_LAYER}.self_attn.{kind}_proj' for kind in 'qkv'],
    f'{_SIGLIP_LAYER}.self_attn.out_proj',
    (f'{_SIGLIP_LAYER}.mlp.fc1', f'{_SIGLIP_LAYER}.mlp.fc2'),
  ),
}
# `VisionTransformer` of timm; OpenVLA renames the `gamma` of LayerScale.
TIMM = {
  'patch_DOUU': Tensor('patch_embed.proj.weight'),
  'patch_bias_D': Tensor('patch_embed.proj.bias'),
  'position_PD': Tensor('pos_embed', ones=1),
  'class_ID': Tensor('cls_token', ones=1),
  'register_GD': Tensor('reg_token', ones=1),
  'attention_scale_D': Tensor(f'{_TIMM_LAYER}.ls1.gamma'),
  'feedforward_scale_D': Tensor(f'{_TIMM_LAYER}.ls2.gamma'),
  **_pair('norm_D', 'norm_bias_D', 'norm', None),
  **_layer(
    (f'{_TIMM_LAYER}.norm1', f'{_TIMM_LAYER}.norm2'),
    [f'{_TIMM_LAYER}.attn.qkv'] * 3,
    f'{_TIMM_LAYER}.attn.proj',
    (f'{_TIMM_LAYER}.mlp.fc1', f'{_TIMM_LAYER}.mlp.fc2'),
  ),
}
for _part, _kind in enumerate(('query', 'key', 'value')):
  for _name in f'{_kind}_DHW', f'{_kind}_bias_HW':
    TIMM[_name] = TIMM[_name]._replace(part=(_part, 3))


def prefixed(
  names: Mapping[str, Tensor], prefix: str, **replaced: str
) -> dict[str, Tensor]:
  """The same tensors inside a larger model.

  Args:
    names: tensors by parameter.
    prefix: what their names begin with there.
    **replaced: parts of the names that differ there, and what they become.
  """
  found = {}
  for key, tensor in names.items():
    name = tensor.name
    for old, new in replaced.items():
      name = name.replace(old, new)
    found[key] = tensor._replace(name=f'{prefix}{name}')
  return found


def of_transformers(raw: dict, **settings) -> vit.Config:
  """The configuration in a config.json of a tower of `transformers`.

  Args:
    raw: its content, of type 'dinov2_with_registers' or 'siglip_vision_model'.
    **settings: fields of `vit.Config` that it does not state, such as `dtype`.

  Raises:
    CheckpointError: for another type, or a setting that is not supported.
  """
  kind = raw.get('model_type')
  if kind not in ('dinov2_with_registers', 'siglip_vision_model'):
    raise weights.CheckpointError(
      f'A vision tower of type {kind!r} is not supported: '
      'dinov2_with_registers and siglip_vision_model are.'
    )
  if raw.get('use_swiglu_ffn') or raw.get('qkv_bias') is False:
    raise weights.CheckpointError(
      'A vision tower with a SwiGLU feed-forward or without biases is not '
      'supported: use_swiglu_ffn must be false, and qkv_bias true.'
    )
  activation = {'gelu': 'gelu', 'gelu_pytorch_tanh': 'gelu_tanh'}
  if raw['hidden_act'] not in activation:
    raise weights.CheckpointError(
      f'A vision tower with the activation {raw["hidden_act"]!r} is not '
      f'supported: {" and ".join(activation)} are.'
    )
  width = raw['hidden_size']
  is_dino = kind == 'dinov2_with_registers'
  own = (
    {
      'F': raw['mlp_ratio'] * width,
      'has_class': True,
      'class_has_position': True,
      'registers': raw['num_register_tokens'],
      'layer_scale': True,
      'antialias': True,
    }
    if is_dino
    else {'F': raw['intermediate_size']}
  )
  return vit.Config(
    image_size=raw['image_size'],
    patch_size=raw['patch_size'],
    D=width,
    L=raw['num_hidden_layers'],
    H=raw['num_attention_heads'],
    activation=activation[raw['hidden_act']],
    norm_epsilon=raw['layer_norm_eps'],
    **own,
    **settings,
  )
