"""A small model to begin with, made on the spot: fresh weights, then imitation.

Reinforcement learning needs a policy that is right sometimes. Where there is no
pretrained checkpoint, this makes one in the same form: a language model as a
folder that `transformers` loads too, a robot's policy as a run exports it.
"""

from collections.abc import Callable, Sequence
import pathlib
import shutil
from typing import Any

import jax

from stages.language import tokens
from stages.models import qwen, transformer, weights


def checkpoint(
  workdir: str,
  *,
  given: str | None = None,
  corpus: Callable[[], Sequence[str]],
  vocabulary: int,
  width: int,
  layers: int,
  heads: int,
  kv_heads: int,
  feed_forward: int,
  rope_theta: float = 1e4,
  seed: int = 0,
) -> str:
  """The folder of the checkpoint to begin with, made if it is not there.

  Args:
    workdir: the run folder; it is made in `workdir`/warm_start/model.
    given: a checkpoint that exists; nothing is made then.
    corpus: text for the tokenizer to learn from.
    vocabulary: most tokens.
    width: of the model.
    layers: of the model.
    heads: of queries.
    kv_heads: of keys and values.
    feed_forward: width of the feed-forward.
    rope_theta: θ of the rotary embedding.
    seed: of the weights.
  """
  if given:
    return given
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
  qwen.save_config(part, config, eos_token_id=end, pad_token_id=end)
  fresh = transformer.init_params(config, jax.random.key(seed))
  weights.save(part, fresh, qwen.NAMES)
  part.replace(model)
  return str(model)


def cloned(workdir: str, *, given: str | None = None) -> str:
  """The folder of the robot's policy to begin with, which `warm_up` makes.

  Args:
    workdir: the run folder.
    given: a policy that exists; none is made then.
  """
  return given or str(pathlib.Path(workdir) / 'warm_start' / 'model')


def warm_up(
  workdir: str,
  *,
  given: str | None = None,
  train: Callable[..., Any],
  seed: int,
):
  """Trains what to begin with by imitation until it is right sometimes.

  Args:
    workdir: the run folder; the warm-up's own is `workdir`/warm_start.
    given: a checkpoint that exists; it is left as it is.
    train: `train.train`, configured for imitation; its export is what the run
      begins with.
    seed: of the run.
  """
  if given:
    return
  train(workdir=f'{workdir}/warm_start', seed=seed, resume=True)
