"""Models as Hugging Face checkpoints: loading, policies and exporting."""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import json
import pathlib
import shutil
from typing import Any

import jax
import jax.numpy as jnp

from sharding import deferred
from stages import base, kernels, ranges
from stages import remat as remat_lib
from stages.language import language_model, sample, stops, tokens
from stages.models import adapters, families, lora_merge, transformer
from stages.models import config as config_lib
from stages.models import lora as lora_lib
from stages.models.files import naming, weights, weights_writer
from stages.models.vision import vision_files

# Files of a checkpoint beside its tensors, which `export` copies.
COMPANIONS = (
  'tokenizer.json',
  'tokenizer_config.json',
  'special_tokens_map.json',
  'added_tokens.json',
  'tokenizer.model',
  'vocab.json',
  'merges.txt',
  'chat_template.jinja',
  'generation_config.json',
  'preprocessor_config.json',
  'processor_config.json',
  'chat_template.json',
)


def raw_config(checkpoint) -> tuple[Any, pathlib.Path]:
  """The content of a checkpoint's config.json, and its path."""
  path = pathlib.Path(checkpoint) / 'config.json'
  if adapters.is_adapter(checkpoint) and not path.is_file():
    raise weights.CheckpointError(
      f'{checkpoint} holds an adapter of PEFT, not a model: give the folder of '
      'the model that it adapts, and this one as `lora.Lora.adapter` '
      '(LORA_ADAPTER in gin, --adapter in a chat).'
    )
  if not path.is_file():
    raise weights.CheckpointError(
      f'There is no checkpoint at {checkpoint}: {path} was not found. '
      f'{weights.where_to_get(checkpoint)}'
    )
  return weights.read_json(path), path


def model_type(checkpoint: str | pathlib.Path) -> str:
  """The architecture of a checkpoint, a key of `families.FAMILIES`."""
  raw, path = raw_config(checkpoint)
  families.family_of(raw, path)
  return raw['model_type']


def names(checkpoint: str | pathlib.Path) -> naming.Names:
  """The names of a checkpoint's tensors, by parameter."""
  return families.family_of(*raw_config(checkpoint)).names


def load_config(
  checkpoint: str | pathlib.Path,
  *,
  dtype: str | None = None,
  remat=remat_lib.AUTO,
  attention: str = kernels.AUTO,
) -> transformer.Config:
  """The model configuration in a checkpoint's config.json.

  Args:
    checkpoint: folder of a Hugging Face checkpoint.
    dtype: type of the arithmetic; that of the checkpoint if None, or bfloat16
      for one in float16, whose gradients would be rounded to zero.
    remat: as in `transformer.Config`.
    attention: likewise.

  Raises:
    CheckpointError: if the folder is missing, or holds a model or a setting
      that is not supported.
  """
  config = families.read(
    *raw_config(checkpoint), dtype=dtype, remat=remat, attention=attention
  )
  if config.vision is None:
    return config
  seen = vision_files.read_processor(checkpoint)
  vision = dataclasses.replace(config.vision, mean=seen.mean, std=seen.std)
  return dataclasses.replace(config, vision=vision)


def vision(checkpoint: str | pathlib.Path) -> config_lib.VisionConfig | None:
  """The vision tower of a checkpoint; None for a model that reads text alone.

  A folder that holds only a tokenizer has none.
  """
  if not (pathlib.Path(checkpoint) / 'config.json').is_file():
    return None
  raw, path = raw_config(checkpoint)
  if (
    not isinstance(raw, dict) or raw.get('model_type') not in families.FAMILIES
  ):
    return None  # Reading the model raises the error.
  if not families.family_of(raw, path).has_vision:
    return None
  return vision_files.read(raw, path)


def check_params(checkpoint: str | pathlib.Path, config: transformer.Config):
  """Checks names and shapes of a checkpoint's tensors, without their values.

  Raises:
    CheckpointError: names all missing, extra and wrongly shaped tensors.
  """
  weights.check(
    checkpoint,
    transformer.param_shapes(config),
    names(checkpoint),
    ignored=_ignored(config),
  )


def load_params(
  checkpoint: str | pathlib.Path, config: transformer.Config, shapes=None
):
  """The parameters of a checkpoint, in the dtypes of `shapes` if given."""
  return weights.load(
    checkpoint,
    shapes or transformer.param_shapes(config),
    names(checkpoint),
    ignored=_ignored(config),
  )


def _ignored(config: transformer.Config) -> frozenset[str]:
  """Tensors that a checkpoint may have and that are not read."""
  # Some checkpoints of tied models store the embedding a second time.
  return frozenset({'lm_head.weight'} if config.tie_embeddings else ())


def _check_engine(slots: int | None, replay_routing: bool):
  """Refuses what only generation with the model itself can do."""
  if slots is not None:
    raise ValueError(
      f'slots={slots} is given for the loop in JAX, and an engine to generate '
      'in its place: leave out one of them. The slots of vLLM are '
      'vllm.engine.max_num_seqs.'
    )
  if replay_routing:
    raise ValueError(
      'replay_routing is on, and an engine generates, which does not say which '
      'experts it has used: generate in JAX, or set replay_routing to False '
      '(REPLAY in gin).'
    )


def policy(
  checkpoint: str,
  *,
  response_length: ranges.PositiveInt,
  sampling: sample.Sampling = sample.Sampling(),
  dtype: str | None = None,
  remat: str = remat_lib.AUTO,
  attention: str = kernels.AUTO,
  max_live_logits: ranges.PositiveInt = language_model.MAX_LIVE_LOGITS,
  slots: ranges.PositiveInt | None = None,
  packed_tokens: ranges.PositiveInt | None = None,
  replay_routing: bool = False,
  engine: Callable[..., base.Policy] | None = None,
  lora: lora_lib.Lora | None = None,
  stop_texts: str | Sequence[str] = (),
) -> base.Policy:
  """A policy from a checkpoint.

  Args:
    checkpoint: folder of a model in Hugging Face format, of an architecture in
      `families.FAMILIES`.
    response_length: maximum tokens of a completion.
    sampling: distribution to sample from.
    dtype: as in `load_config`.
    remat: as in `transformer.Config`.
    attention: likewise.
    max_live_logits: as in `language_model.policy`.
    slots: as in `language_model.policy`.
    packed_tokens: likewise.
    replay_routing: likewise.
    engine: an engine that generates in place of the model, such as vLLM:
      `policy, *, checkpoint, config, names, response_length, stop, sampling,
      stop_texts -> policy`; None to generate with the model itself.
    lora: adapters that are trained in place of the weights, which are then held
      in the type of the arithmetic; None to train the weights.
    stop_texts: texts that end a completion, with the token in which one ends;
      of a conversation, they end a turn.

  Raises:
    ValueError: for both an engine and slots or `replay_routing`, or for texts
      that the tokenizer cannot write.
  """
  if engine is not None:
    _check_engine(slots, replay_routing)
  settings = {'dtype': dtype, 'remat': remat, 'attention': attention}
  config, start = load_config(checkpoint, **settings), None
  if config.vision is not None and (engine is not None or lora):
    unknown = 'an engine (vLLM)' if engine is not None else 'LoRA'
    raise ValueError(
      f'{checkpoint} reads pictures, and {unknown} is not supported for such a '
      'model: generate in JAX, and train all weights.'
    )
  shapes = transformer.param_shapes(config)
  if lora:
    shapes, lora, start = _adapter(config, shapes, lora)

  def init(key):
    if deferred.only_shapes(key):  # Only shapes are needed.
      return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return load_params(checkpoint, config, shapes)

  settings = {
    'response_length': response_length,
    'stop': stops.stop_tokens(checkpoint),
    'sampling': sampling,
    'stop_texts': stops.automaton(checkpoint, stop_texts, config.V),
  }
  result = language_model.policy(
    config,
    **settings,
    init=init,
    max_live_logits=max_live_logits,
    slots=slots,
    packed_tokens=packed_tokens,
    replay_routing=replay_routing,
  )
  if engine is not None:
    result = engine(
      result,
      checkpoint=checkpoint,
      config=config,
      names=names(checkpoint),
      **settings,
    )
  return lora_lib.wrap(result, lora, start) if lora else result


def _adapter(config: transformer.Config, shapes, lora: lora_lib.Lora):
  """Shapes of frozen weights, settings of their adapter, and how it starts."""
  # Rounding does not change the model, and nothing is added to the weights.
  rounded = functools.partial(transformer.compute_params, config)
  shapes, start = jax.eval_shape(rounded, shapes), None
  if lora.adapter:
    lora, start = adapters.load(lora, shapes)
  lora_lib.shapes(shapes, lora)  # Refuses targets that the model lacks.
  return shapes, lora, start


def teacher(
  checkpoint: str,
  *,
  student: str,
  sampling: sample.Sampling = sample.Sampling(),
  dtype: str | None = None,
  max_live_logits: ranges.PositiveInt = language_model.MAX_LIVE_LOGITS,
  packed_tokens: ranges.PositiveInt | None = None,
) -> base.Policy:
  """A policy that scores the completions of another one.

  Args:
    checkpoint: as for `policy`.
    student: folder of the model whose tokens are scored.
    sampling: the distribution that tokens are scored under; that of the
      student, or `distillation` refuses the pair.
    dtype: as for `policy`.
    max_live_logits: likewise.
    packed_tokens: likewise.

  Raises:
    ValueError: if the two have different vocabularies.
  """
  own, other = (
    tokens.load_tokenizer(folder).get_vocab()
    for folder in (checkpoint, student)
  )
  if own != other:
    differing = sorted(
      token for token in {*own, *other} if own.get(token) != other.get(token)
    )
    raise ValueError(
      f'The teacher {checkpoint} has another vocabulary than {student}: '
      f'{len(differing)} tokens differ, such as {differing[0]!r}. A teacher '
      'scores the tokens of its student, so give one of the same family.'
    )
  return policy(
    checkpoint,
    response_length=1,  # It never samples.
    sampling=sampling,
    dtype=dtype,
    max_live_logits=max_live_logits,
    packed_tokens=packed_tokens,
  )


def save(
  folder: str | pathlib.Path,
  params,
  config: transformer.Config,
  *,
  model_type: str = 'qwen2',
  **extra,
):
  """Writes a new model as a checkpoint that `transformers` loads.

  Args:
    folder: folder to write.
    params: parameters of the model.
    config: the model.
    model_type: its architecture, a key of `families.FAMILIES`.
    **extra: more settings of config.json, such as ids of special tokens.

  Raises:
    ValueError: if the architecture lacks a setting of the model.
  """
  families.write(folder, config, model_type, **extra)
  weights_writer.save(folder, params, names(folder))


def export(
  folder: str | pathlib.Path,
  params,
  checkpoint: str | pathlib.Path,
  *,
  merge_lora: bool = False,
):
  """Writes trained parameters as a checkpoint that `transformers` loads.

  Adapters become a folder in PEFT's format, or a checkpoint of the model with
  the adapters added to its weights.

  Args:
    folder: folder to write.
    params: parameters of the model; written in the dtype of `checkpoint`.
    checkpoint: the original model, for its configuration and tokenizer.
    merge_lora: whether adapters are added to the weights.
  """
  source = pathlib.Path(checkpoint)
  with weights_writer.new_folder(pathlib.Path(folder)) as part:
    if lora_lib.is_adapted(params) and not merge_lora:
      adapters.write(part, params, source)
    else:
      _export_model(part, lora_merge.merge(params), source)
    for name in COMPANIONS:
      if (source / name).is_file():
        shutil.copy(source / name, part / name)


def _export_model(folder: pathlib.Path, params, source: pathlib.Path):
  config = json.loads((source / 'config.json').read_text())
  dtype = config.pop('torch_dtype', None) or config.get('dtype', 'float32')
  weights_writer.save(folder, params, names(source), dtype=dtype)
  config['dtype'] = dtype
  (folder / 'config.json').write_text(json.dumps(config, indent=2))
