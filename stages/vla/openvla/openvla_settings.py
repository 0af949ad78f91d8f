"""Settings of config.json that an OpenVLA has, and those that are not here."""

from collections.abc import Mapping
from typing import Any

from stages.models.files import config_check
from stages.models.vision import vit

# Sizes of towers in the arguments of timm. They are for small models alone: no
# published folder has them.
TOWER_ARGS = 'timm_model_args'
TIMM_SIZES = {
  'embed_dim': 'D',
  'depth': 'L',
  'num_heads': 'H',
  'mlp_ratio': 'F',
  'patch_size': 'patch_size',
}
SETTINGS = {
  'text_config': config_check.OBJECT,
  'norm_stats': config_check.OBJECT,
  'use_fused_vision_backbone': config_check.FLAG,
  'image_resize_strategy': config_check.TEXT,
  'pad_to_multiple_of': config_check.size(2**16),
  'n_action_bins': config_check.size(2**16, 2),
  'torch_dtype': config_check.DTYPE,
  'dtype': config_check.DTYPE,
}


def unsupported(raw: Mapping[str, Any], towers: Mapping[str, vit.Config]):
  """Yields what the settings of a config.json describe that is not here."""
  text = raw.get('text_config')
  if text is None:
    yield 'text_config is missing'
  elif text.get('model_type', 'llama') != 'llama':
    yield f'its language model is {text["model_type"]!r:.40}, expected llama'
  if raw.get('use_fused_vision_backbone') is False:
    yield 'use_fused_vision_backbone is false, expected two vision towers'
  ids, sizes = raw.get('timm_model_ids'), raw.get('image_sizes')
  if not (
    isinstance(ids, list)
    and len(ids) == 2
    and all(isinstance(name, str) and name in towers for name in ids)
  ):
    known = ', '.join(towers)
    yield f'timm_model_ids is {ids!r:.120}, expected two of {known}'
  if not (
    isinstance(sizes, list)
    and len(sizes) == 2
    and all(type(x) is int and 1 <= x <= 2**16 for x in sizes)
  ):
    yield f'image_sizes is {sizes!r:.40}, expected two numbers of pixels'
  args = raw.get(TOWER_ARGS)
  if args is not None and not (
    isinstance(args, list)
    and len(args) == 2
    and all(isinstance(x, dict) and {*x} <= {*TIMM_SIZES} for x in args)
    and all(
      isinstance(n, int | float) and 0 < n <= 2**16
      for x in args
      for n in x.values()
    )
  ):
    known = ', '.join(TIMM_SIZES)
    yield f'{TOWER_ARGS} is {args!r:.80}, expected two objects of {known}'
  overrides = raw.get('timm_override_act_layers')
  if overrides not in (None, [None, None]):
    yield f'timm_override_act_layers is {overrides!r:.40}, expected nulls'
