"""A small initial model made on the spot: new weights, then imitation.

Reinforcement learning needs a policy that succeeds sometimes. Without a
pretrained checkpoint, this makes one of the same format: a language model as a
folder that `transformers` loads, a robot's policy as a run exports it.
"""

from collections.abc import Callable, Sequence
import pathlib
import shutil
from typing import Any, Protocol

import jax

from stages import ranges
from stages.language import huggingface, tokens
from stages.models import transformer


def checkpoint(
  workdir: str,
  *,
  pretrained: str | None = None,
  corpus: Callable[[], Sequence[str]],
  vocabulary: ranges.PositiveInt,
  width: ranges.PositiveInt,
  layers: ranges.PositiveInt,
  heads: ranges.PositiveInt,
  kv_heads: ranges.PositiveInt,
  feed_forward: ranges.PositiveInt,
  rope_theta: ranges.PositiveFloat = 1e4,
  seed: ranges.NonNegativeInt = 0,
) -> str:
  """The folder of the initial checkpoint, made if it does not exist.

  Args:
    workdir: the run folder; the checkpoint is `workdir`/warm_start/model.
    pretrained: an existing checkpoint, which is used instead.
    corpus: returns the text that the tokenizer is trained on.
    vocabulary: maximum size of the vocabulary.
    width: of the residual stream.
    layers: number of layers.
    heads: query heads.
    kv_heads: key-value heads.
    feed_forward: width of the feed-forward layers.
    rope_theta: θ of the rotary embedding.
    seed: of the initial weights.
  """
  if pretrained:
    return pretrained
  model = pathlib.Path(workdir) / 'warm_start' / 'model'
  if (model / 'config.json').exists():
    return str(model)
  part = model.with_name('model.part')
  shutil.rmtree(part, ignore_errors=True)
  part.mkdir(parents=True)
  tokenizer = tokens.train_tokenizer(part, corpus(), vocabulary)
  config = transformer.Config(
    V=len(tokenizer),
    D=width,
    L=layers,
    H=heads,
    K=kv_heads,
    W=width // heads,
    F=feed_forward,
    rope=transformer.rope_lib.RopeConfig(theta=rope_theta),
  )
  end = tokenizer.eos_token_id
  fresh = transformer.init_params(config, jax.random.key(seed))
  huggingface.save(part, fresh, config, eos_token_id=end, pad_token_id=end)
  part.replace(model)
  return str(model)


def cloned(workdir: str, *, pretrained: str | None = None) -> str:
  """The folder of the initial robot policy, which `warm_up` makes.

  Args:
    workdir: the run folder.
    pretrained: an existing policy, which is used instead.
  """
  return pretrained or str(pathlib.Path(workdir) / 'warm_start' / 'model')


class Train(Protocol):
  """`train.train`, with a workflow and a source."""

  def __call__(self, *, workdir: str, seed: int, resume: bool) -> Any: ...


def warm_up(
  workdir: str,
  *,
  pretrained: str | None = None,
  train: Train,
  seed: ranges.NonNegativeInt,
):
  """Trains the initial model by imitation, until it succeeds sometimes.

  Args:
    workdir: the run folder; the warm-up's is `workdir`/warm_start.
    pretrained: an existing checkpoint, which needs no warm-up.
    train: `train.train`, configured for imitation; the run starts from its
      export.
    seed: of the run.
  """
  if pretrained:
    return
  train(workdir=f'{workdir}/warm_start', seed=seed, resume=True)
