"""Files of Qwen2.5-VL: settings of the tower, its tensors and its pictures.

config.json has the settings of the language model, under `text_config` or, in
published files, beside `vision_config`. preprocessor_config.json (or
processor_config.json) says how pictures are resized and normalized.
"""

from collections.abc import Iterator, Mapping
import dataclasses
import json
import pathlib
from typing import Any

from stages.models import config as config_lib
from stages.models.files import config_check, weights
from stages.models.files.naming import Tensor

TEXT = 'qwen2_5_vl_text'  # The type of its language model.
VISION = 'vision_config'
PROCESSORS = 'preprocessor_config.json', 'processor_config.json'
_LAYER = 'visual.blocks.{i}'
_TAGS = ('query', 'key', 'value')


def _affine(weight: str, bias: str, name: str, inputs: int = 1, part=None):
  """Weights and bias of an affine map, or a part of them."""
  return {
    weight: Tensor(f'{name}.weight', inputs, part=part),
    bias: Tensor(f'{name}.bias', 0, part=part),
  }


def _names() -> dict[str, Any]:
  """The checkpoint tensor of each parameter of the tower."""
  found = {
    'patch_DOTUU': Tensor('visual.patch_embed.proj.weight'),
    'norm_D': Tensor('visual.merger.ln_q.weight'),
    'before_attention_D': Tensor(f'{_LAYER}.norm1.weight'),
    'before_feedforward_D': Tensor(f'{_LAYER}.norm2.weight'),
    **_affine('out_HWD', 'out_bias_D', f'{_LAYER}.attn.proj', 2),
    **_affine('gate_DF', 'gate_bias_F', f'{_LAYER}.mlp.gate_proj'),
    **_affine('up_DF', 'up_bias_F', f'{_LAYER}.mlp.up_proj'),
    **_affine('down_FD', 'down_bias_D', f'{_LAYER}.mlp.down_proj'),
    'merger': {
      **_affine('in_OF', 'in_bias_F', 'visual.merger.mlp.0'),
      **_affine('out_FD', 'out_bias_D', 'visual.merger.mlp.2'),
    },
  }
  for n, (tag, heads) in enumerate(zip(_TAGS, 'HKK', strict=True)):
    found |= _affine(
      f'{tag}_D{heads}W',
      f'{tag}_bias_{heads}W',
      f'{_LAYER}.attn.qkv',
      part=(n, len(_TAGS)),
    )
  return found


NAMES = _names()
# Settings of pictures that have one value here; 3 is Pillow's bicubic filter.
FIXED = {
  'do_resize': True,
  'do_rescale': True,
  'do_normalize': True,
  'rescale_factor': 1 / 255,
  'resample': 3,
}
_SIZE, _TOKEN = config_check.size(2**20), config_check.size(2**24, 0)
SETTINGS = {
  'depth': config_check.size(2**12),
  'hidden_size': _SIZE,
  'intermediate_size': _SIZE,
  'out_hidden_size': _SIZE,
  'num_heads': config_check.size(2**12),
  'in_channels': config_check.size(3, 3),
  'patch_size': config_check.size(2**10),
  'temporal_patch_size': config_check.size(2**6),
  'spatial_merge_size': config_check.size(2**6),
  'window_size': _SIZE,
  'hidden_act': config_check.TEXT,
  'fullatt_block_indexes': config_check.list_of(int, 'whole numbers'),
  'rope_parameters': config_check.OBJECT,
}


def read(raw: dict[str, Any], path) -> config_lib.VisionConfig:
  """The tower that a config.json describes.

  Args:
    raw: its content.
    path: where it was read, for errors.

  Raises:
    CheckpointError: names all that is wrong or not supported.
  """
  import transformers

  given = raw.get(VISION)
  kinds = {VISION: config_check.OBJECT, 'image_token_id': _TOKEN}
  faults = [*config_check.wrong(raw, kinds)]
  if isinstance(given, dict):
    faults += config_check.wrong(given, SETTINGS, f'{VISION}.')
  if not faults:
    c = transformers.Qwen2_5_VLConfig.from_dict(
      {key: raw[key] for key in kinds if raw.get(key) is not None}
    )
    faults = [*_unsupported(c.vision_config, of_text(raw))]
  if faults:
    raise weights.CheckpointError(
      f'{path} cannot describe a model: {"; ".join(faults)}.'
    )
  v = c.vision_config
  try:
    return config_lib.VisionConfig(
      D=v.hidden_size,
      L=v.depth,
      H=v.num_heads,
      F=v.intermediate_size,
      token=c.image_token_id,
      full_layers=tuple(v.fullatt_block_indexes),
      # Whole squares, as `transformers` counts them.
      window=v.window_size
      // v.spatial_merge_size
      // v.patch_size
      * v.spatial_merge_size,
      patch_size=v.patch_size,
      frames=v.temporal_patch_size,
      merge=v.spatial_merge_size,
    )
  except ValueError as error:
    raise weights.CheckpointError(f'{path}: {error}') from error


def _unsupported(v, text: Mapping[str, Any]) -> Iterator[str]:
  """Yields what the tower is not, in a sentence each."""
  if v.hidden_act != 'silu':
    yield f'{VISION}.hidden_act is {v.hidden_act!r:.40}, expected silu'
  rope = v.rope_parameters or {}
  theta = rope.get('rope_theta', 1e4), rope.get('rope_type', 'axial')
  if theta != (1e4, 'axial'):
    yield f'{VISION}.rope_parameters are {theta!r:.60}, expected (1e4, axial)'
  if v.window_size < v.patch_size * v.spatial_merge_size:
    yield (
      f'{VISION}.window_size is {v.window_size}, expected a square of patches '
      'or more'
    )
  width = text.get('hidden_size')
  if width is not None and v.out_hidden_size != width:
    yield (
      f'{VISION}.out_hidden_size is {v.out_hidden_size}, expected that of the '
      f'language model, {width}'
    )


def of_text(raw: Mapping[str, Any]) -> dict[str, Any]:
  """The settings of the language model alone, as those of a config.json."""
  inner = raw.get('text_config')
  inner = inner if isinstance(inner, dict) else {}
  tied = any(x.get('tie_word_embeddings') for x in (raw, inner))
  kept = {k: v for k, v in raw.items() if k not in ('text_config', VISION)}
  own = {'model_type': TEXT, 'tie_word_embeddings': bool(tied)}
  return {**kept, **inner, **own}


def joined(text, c: config_lib.Config):
  """The configuration of `transformers` of a model with its tower.

  Args:
    text: that of the language model.
    c: the model.

  Raises:
    ValueError: for a model without a tower, or of other heads.
  """
  import transformers

  v = c.vision
  if v is None or c.H * c.W != c.D:
    raise ValueError(
      'A config.json of type qwen2_5_vl describes a model with a vision tower, '
      f'whose heads are together as wide as it: {c.H} heads of {c.W} are given '
      f'for a width of {c.D}, and the tower is {v}.'
    )
  vision = {
    'depth': v.L,
    'hidden_size': v.D,
    'intermediate_size': v.F,
    'num_heads': v.H,
    'out_hidden_size': c.D,
    'patch_size': v.patch_size,
    'spatial_merge_size': v.merge,
    'temporal_patch_size': v.frames,
    'window_size': v.window * v.patch_size,
    'fullatt_block_indexes': [*v.full_layers],
    'initializer_range': c.init_stddev,
  }
  return transformers.Qwen2_5_VLConfig(
    text_config=text.to_dict(),
    vision_config=vision,
    image_token_id=v.token,
    tie_word_embeddings=c.tie_embeddings,
    architectures=text.architectures,
    dtype=c.dtype,
  )


@dataclasses.dataclass(frozen=True)
class Processor:
  """The pre-processing of pictures of a checkpoint.

  Attributes:
    min_pixels: fewest pixels that a picture is resized to.
    max_pixels: the most.
    mean: as in `config.VisionConfig`.
    std: likewise.
  """

  min_pixels: int = 56 * 56
  max_pixels: int = 28 * 28 * 1280
  mean: tuple[float, float, float] = config_lib.VisionConfig.mean
  std: tuple[float, float, float] = config_lib.VisionConfig.std


def read_processor(checkpoint: str | pathlib.Path) -> Processor:
  """The pre-processing of a checkpoint; that of Qwen2-VL without a file.

  Raises:
    CheckpointError: for settings of another type or range.
  """
  found = [pathlib.Path(checkpoint) / name for name in PROCESSORS]
  path = next((x for x in found if x.is_file()), None)
  if path is None:
    return Processor()
  raw = weights.read_json(path)
  if isinstance(raw, dict):
    raw = raw.get('image_processor', raw)
  if not isinstance(raw, dict):
    raise weights.CheckpointError(
      f'{path} does not describe pictures: expected an object.'
    )
  size = raw.get('size') if isinstance(raw.get('size'), dict) else {}
  given = {
    'min_pixels': raw.get('min_pixels') or size.get('shortest_edge'),
    'max_pixels': raw.get('max_pixels') or size.get('longest_edge'),
    'mean': raw.get('image_mean'),
    'std': raw.get('image_std'),
  }
  pixels = config_check.size(2**40)
  color = config_check.Kind('three numbers above 0', _is_color)
  kinds = dict.fromkeys(given, pixels) | {'mean': color, 'std': color}
  faults = [*config_check.wrong(given, kinds)]
  faults += [
    f'{key} is {raw[key]!r:.40}, expected {value!r}'
    for key, value in FIXED.items()
    if raw.get(key) is not None and raw[key] != value
  ]
  if faults:
    raise weights.CheckpointError(
      f'{path} cannot prepare pictures: {"; ".join(faults)}.'
    )
  return Processor(
    **{
      key: tuple(value) if isinstance(value, list) else value
      for key, value in given.items()
      if value is not None
    }
  )


def _is_color(value) -> bool:
  return (
    isinstance(value, list)
    and len(value) == 3
    and all(config_check.POSITIVE.holds(x) for x in value)
  )


def write_processor(folder, v: config_lib.VisionConfig):
  """Writes the preprocessor_config.json of a new model."""
  settings = {
    'image_processor_type': 'Qwen2VLImageProcessor',
    'processor_class': 'Qwen2_5_VLProcessor',
    'image_mean': [*v.mean],
    'image_std': [*v.std],
    'min_pixels': Processor.min_pixels,
    'max_pixels': Processor.max_pixels,
    'patch_size': v.patch_size,
    'temporal_patch_size': v.frames,
    'merge_size': v.merge,
  }
  path = pathlib.Path(folder) / PROCESSORS[0]
  path.write_text(json.dumps(settings, indent=2))
