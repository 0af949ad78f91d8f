"""Reading prompts before the loop that decodes their completions."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from stages import base
from stages.language.decoding import kv_cache, routing_replay
from stages.models import transformer
from stages.models.layers import attention, mixture
from stages.models.vision import patches

# Tokens of prompts that are read at once. More do not make better use of the
# arithmetic units, and their activations take memory.
MAX_PROMPT_TOKENS = 2**14


class SplitPrompt(NamedTuple):
  """Prompts of groups, without their last token.

  The last token of a prompt is the first input of its completions: its logits
  predict the first sampled token. The rest is read for keys and values only.

  Attributes:
    prompt_NP: prompt tokens, one row a group.
    mask_NP: 1 on all real tokens but the last.
    token_B: the last token.
    position_B: its position.
    pictures: pictures of the prompts, one row a group; None without any.
  """

  prompt_NP: Array
  mask_NP: Array
  token_B: Array
  position_B: Array
  pictures: patches.Pictures | None = None

  @property
  def read(self) -> tuple:
    """The part of the prompts that a model reads."""
    return self.prompt_NP, self.mask_NP, self.pictures


def split_prompt(
  prompt: base.Prompt | patches.PicturePrompt, group_size: int
) -> SplitPrompt:
  """Takes each group's prompt once and separates its last token."""
  token_NP, mask_NP = prompt.token[::group_size], prompt.mask[::group_size]
  last_N = mask_NP.sum(1, dtype=jnp.int32) - 1
  is_last_NP = transformer.positions(mask_NP) == last_N[:, None]
  is_last_NP &= mask_NP > 0
  token_N = jnp.where(is_last_NP, token_NP, 0).sum(1, dtype=token_NP.dtype)
  pictures = None
  if isinstance(prompt, patches.PicturePrompt):
    pictures = jax.tree.map(lambda x: x[::group_size], prompt.pictures)
    last_N = jnp.where(is_last_NP, pictures.position[..., 0], 0)
    last_N = last_N.sum(1, dtype=jnp.int32)
  return SplitPrompt(
    token_NP,
    jnp.where(is_last_NP, 0, mask_NP),
    jnp.repeat(token_N, group_size),
    jnp.repeat(last_N, group_size),
    pictures,
  )


def read(
  model, params, prompt: tuple, record: bool
) -> tuple[attention.PromptCache, Array | None]:
  """Keys and values of prompts; with `record`, their experts [N, P, L, k].

  Args:
    model: the model.
    params: its parameters.
    prompt: `SplitPrompt.read`.
    record: whether to return experts.
  """
  apply = functools.partial(
    model.apply, {'params': params}, *prompt, method='prefill'
  )
  if not record:
    return apply(), None
  cache, left = apply(mutable=[mixture.ROUTING])
  return cache, routing_replay.of_prompts(model.config, left)


def prompt_layers(
  model, params, split: SplitPrompt, record: bool, in_place: bool = False
):
  """By layer: its parameters, and its prompts' keys and values [N, K, P, W].

  Also the experts of the prompts, as `read` returns them.

  All prompts are read before the loop, in chunks. In the loop, prompts of a few
  rows would each read all parameters, while all slots wait.
  """
  layers = range(model.config.L)

  def by_layer(prompt):
    cache, expert = read(model, params, prompt, record)
    return [
      kv_cache.LayerCache(*(jnp.swapaxes(x[i], 1, 2) for x in cache))
      for i in layers
    ], expert

  (N, P), prompt = split.mask_NP.shape, split.read
  n = max(1, MAX_PROMPT_TOKENS // P)
  if n >= N:
    caches, expert = by_layer(prompt)
  else:
    chunks = -(-N // n)

    def chunk(x):
      padding = [(0, chunks * n - N)] + [(0, 0)] * (x.ndim - 1)
      return jnp.pad(x, padding).reshape(chunks, n, *x.shape[1:])

    prompt = jax.tree.map(chunk, prompt)
    # The last chunk is filled up with rows that no index reaches.
    caches, expert = jax.tree.map(
      lambda x: x.reshape(chunks * n, *x.shape[2:]),
      jax.lax.map(by_layer, prompt),
    )
  own, caches = transformer.unstacked(model.config, params, caches, in_place)
  found = [(layer, *cache) for layer, cache in zip(own, caches, strict=True)]
  return found, None if expert is None else expert[:N]


def cached_layers(
  model, params, cache: attention.PromptCache, in_place: bool = False
):
  """By layer: its parameters, and its prompts' keys and values [N, K, P, W]."""
  # Unrolled, because a scan would copy the whole cache at every token.
  # Transposed once, into the layout that every token reads.
  own, cache = transformer.unstacked(model.config, params, cache, in_place)
  return [
    (
      layer,
      jnp.swapaxes(cache.key[i], 1, 2),
      jnp.swapaxes(cache.value[i], 1, 2),
    )
    for i, layer in enumerate(own)
  ]
