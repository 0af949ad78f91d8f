"""Reading prompts before the loop that decodes their completions."""

import jax
import jax.numpy as jnp

from stages.language.decoding import kv_cache
from stages.models import transformer

# Tokens of prompts that are read at once. More do not make better use of the
# arithmetic units, and their activations take memory.
MAX_PROMPT_TOKENS = 2**14


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
