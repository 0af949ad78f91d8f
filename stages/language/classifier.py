"""Models with a head of one number, from folders of Hugging Face.

A `*ForSequenceClassification` of the architectures in `families.FAMILIES` has
the trunk of a causal language model, and one linear map in place of its output
layer.
"""

import dataclasses
import functools
import pathlib
from typing import Any, Literal

import jax
import jax.numpy as jnp

from sharding import deferred
from stages import kernels, ranges
from stages import remat as remat_lib
from stages.language import huggingface
from stages.language import value_model as value_model_lib
from stages.models import families, transformer
from stages.models.files import config_check, naming, weights

HEAD = {'value_D': naming.Tensor('score.weight', 1)}
CLASS = 'ForSequenceClassification'


def value_model(
  checkpoint: str,
  *,
  trunk: Literal['own', 'policy'] = 'own',
  dtype: str | None = None,
  remat: str = remat_lib.AUTO,
  attention: str = kernels.AUTO,
  packed_tokens: ranges.PositiveInt | None = None,
) -> value_model_lib.ValueModel:
  """A value model that starts from a checkpoint.

  Args:
    checkpoint: folder of a model in Hugging Face format: a causal language
      model, whose head is zero at first, or a classifier of one label, such as
      a reward model, whose head is kept. For a head on the trunk of the policy,
      the folder of the policy.
    trunk: 'own' for a second transformer, which learns by itself; 'policy' for
      a head on the transformer of the policy, which both train.
    dtype: as in `huggingface.load_config`.
    remat: as in `transformer.Config`.
    attention: likewise.
    packed_tokens: as in `value_model.own_trunk`.

  Raises:
    CheckpointError: for a folder that is neither, or a head that cannot be on
      another trunk.
  """
  settings = {'dtype': dtype, 'remat': remat, 'attention': attention}
  config, has_head = load_config(checkpoint, **settings)
  if trunk == 'own':
    init = functools.partial(_init, checkpoint, config, has_head)
    return value_model_lib.own_trunk(
      config, init=init, packed_tokens=packed_tokens
    )
  if trunk != 'policy':
    raise ValueError(
      f"The trunk of values is 'own' or 'policy', not {trunk!r}."
    )
  if has_head:
    raise weights.CheckpointError(
      f'{checkpoint} is a classifier, whose head belongs to its own trunk: '
      "give it trunk='own', or give the folder of the policy."
    )
  return value_model_lib.head(config, packed_tokens=packed_tokens)


def reward_model(
  checkpoint: str,
  *,
  dtype: str | None = None,
  packed_tokens: ranges.PositiveInt | None = None,
) -> value_model_lib.ValueModel:
  """A reward model, whose value after the last token is the reward.

  It is never trained, so its parameters are rounded to the type of its
  arithmetic as they are read. Rewards are the same.

  Args:
    checkpoint: folder of a classifier of one label.
    dtype: as in `huggingface.load_config`.
    packed_tokens: as in `value_model.own_trunk`; at least the tokens of a
      prompt and of its completion.

  Raises:
    CheckpointError: for another model.
  """
  config, has_head = load_config(checkpoint, dtype=dtype)
  if not has_head:
    raise weights.CheckpointError(
      f'{checkpoint} is a language model, which has no head for rewards: give '
      f'the folder of a model whose architecture ends in {CLASS}.'
    )

  def init(key):
    params = _init(checkpoint, config, has_head, key)
    if jnp.dtype(config.dtype) == config.param_dtype:
      return params
    return transformer.compute_params(config, params)

  return value_model_lib.own_trunk(
    config, init=init, packed_tokens=packed_tokens
  )


def load_config(
  checkpoint: str | pathlib.Path,
  *,
  dtype: str | None = None,
  remat=remat_lib.AUTO,
  attention: str = kernels.AUTO,
) -> tuple[transformer.Config, bool]:
  """The trunk that a config.json describes, and whether it has a head.

  Raises:
    CheckpointError: if the model is not supported, or the head has several
      outputs.
  """
  raw, path = huggingface.raw_config(checkpoint)
  config_check.check_identity(raw, path)
  classes = raw.get('architectures') or ()
  has_head = any(name.endswith(CLASS) for name in classes)
  if has_head:
    raw = {key: x for key, x in raw.items() if key != 'architectures'}
  settings = {'dtype': dtype, 'remat': remat, 'attention': attention}
  config = families.read(raw, path, **settings)
  # As transformers, which by default gives a classifier two labels.
  labels = len(raw.get('id2label') or ()) or raw.get('num_labels') or 2
  if has_head and labels != 1:
    raise weights.CheckpointError(
      f'{path} describes a classifier of {labels} labels; a value or a reward '
      'is one number, so num_labels must be 1.'
    )
  # The head takes the place of the output layer.
  return dataclasses.replace(config, tie_embeddings=True), has_head


def load_params(
  checkpoint: str | pathlib.Path, config: transformer.Config, has_head: bool
) -> Any:
  """The parameters of a trunk and of its head, which is zero if it has none."""
  shapes = transformer.param_shapes(config)
  head = value_model_lib.init_head(config)
  if not has_head:
    ignored = frozenset({'lm_head.weight'})
    trunk = weights.load(
      checkpoint, shapes, huggingface.names(checkpoint), ignored=ignored
    )
    return trunk | head
  return weights.load(checkpoint, shapes | head, names(checkpoint))


def names(checkpoint: str | pathlib.Path) -> dict[str, naming.Tensor]:
  """The tensor of a classifier's folder that holds each parameter."""
  raw, _ = huggingface.raw_config(checkpoint)
  return families.FAMILIES[raw['model_type']].names | HEAD


def _init(checkpoint, config: transformer.Config, has_head: bool, key):
  """Reads the parameters; while tracing, when only shapes count, zeros."""
  if deferred.only_shapes(key):
    return jax.tree.map(
      lambda x: jnp.zeros(x.shape, x.dtype), transformer.param_shapes(config)
    ) | value_model_lib.init_head(config)
  return load_params(checkpoint, config, has_head)
