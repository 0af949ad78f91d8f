"""Reading prompts before the loop that decodes their completions."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from stages import base
from stages.language.decoding import kv_cache
from stages.models import transformer
from stages.models.layers import attention

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
  """

  prompt_NP: Array
  mask_NP: Array
  token_B: Array
  position_B: Array


def split_prompt(prompt: base.Prompt, group_size: int) -> SplitPrompt:
  """Takes each group's prompt once and separates its last token."""
  token_NP, mask_NP = prompt.token[::group_size], prompt.mask[::group_size]
  last_N = mask_NP.sum(1, dtype=jnp.int32) - 1
  is_last_NP = transformer.positions(mask_NP) == last_N[:, None]
  is_last_NP &= mask_NP > 0
  token_N = jnp.where(is_last_NP, token_NP, 0).sum(1, dtype=token_NP.dtype)
  return SplitPrompt(
    token_NP,
    jnp.where(is_last_NP, 0, mask_NP),
    jnp.repeat(token_N, group_size),
    jnp.repeat(last_N, group_size),
  )


def prompt_layers(model, params, prompt_NP, mask_NP):
  """By layer: its parameters, and its prompts' keys and values [N, K, P, W].

  All prompts are read before the loop, in chunks. In the loop, prompts of a few
  rows would each read all parameters, while all slots wait.
  """
  layers = range(model.config.L)

  def read(prompt):
    cache = model.apply({'params': params}, *prompt, method='prefill')
    return [
      kv_cache.LayerCache(*(jnp.swapaxes(x[i], 1, 2) for x in cache))
      for i in layers
    ]

  (N, P), prompt = mask_NP.shape, (prompt_NP, mask_NP)
  n = max(1, MAX_PROMPT_TOKENS // P)
  if n >= N:
    caches = read(prompt)
  else:
    chunks = -(-N // n)
    padding = [(0, chunks * n - N), (0, 0)]
    prompt = [jnp.pad(x, padding).reshape(chunks, n, P) for x in prompt]
    caches = jax.tree.map(
      lambda x: x.reshape(chunks * n, *x.shape[2:]), jax.lax.map(read, prompt)
    )
  return [(transformer.layer_params(params, i), *caches[i]) for i in layers]


def cached_layers(model, params, cache: attention.PromptCache):
  """By layer: its parameters, and its prompts' keys and values [N, K, P, W]."""
  # Unrolled, because a scan would copy the whole cache at every token.
  # Transposed once, into the layout that every token reads.
  return [
    (
      transformer.layer_params(params, i),
      jnp.swapaxes(cache.key[i], 1, 2),
      jnp.swapaxes(cache.value[i], 1, 2),
    )
    for i in range(model.config.L)
  ]
