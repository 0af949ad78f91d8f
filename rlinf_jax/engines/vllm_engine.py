"""Runs vLLM on a thread of its own.

Requests are submitted and awaited separately, so that later requests are under
way while the results of earlier ones are learned from. Requests with the same
parameters are decoded together; a request with other parameters waits until
those have ended. On a place that shares its devices, vLLM sleeps while another
place uses them.
"""

import atexit
import collections
from collections.abc import Callable, Sequence, Set
from concurrent import futures
import dataclasses
import functools
import threading
from typing import Any, NamedTuple
import weakref

import jax

from rlinf_jax.engines import vllm_start
from rlinf_jax.runtime import lease as lease_lib
from stages.models.files import naming, weights


@dataclasses.dataclass(frozen=True)
class Settings:
  """Settings of an engine; equal settings share one engine.

  Attributes:
    checkpoint: folder whose configuration is read.
    dtype: type of the arithmetic.
    max_num_seqs: maximum number of completions decoded at once.
    kv_cache_memory_bytes: memory for keys and values.
    max_model_len: maximum tokens of a prompt and its completion together; that
      of the first request if None.
  """

  checkpoint: str
  dtype: str
  max_num_seqs: int
  kv_cache_memory_bytes: int
  max_model_len: int | None


class Completion(NamedTuple):
  """The completion of one prompt.

  Attributes:
    token: token ids, including the end token.
    logp: log-probability of each under the sampling distribution.
    ended: whether it ended with an end token, not by the length limit.
  """

  token: Sequence[int]
  logp: Sequence[float]
  ended: bool


class Request(NamedTuple):
  """Prompts to complete with given parameters.

  Attributes:
    params: parameters of the model.
    names: the checkpoint tensor of each parameter.
    prompts: token ids.
    sampling: for each prompt, arguments of vLLM's `SamplingParams`.
    max_model_len: maximum tokens of a prompt and its completion together.
    should_stop: whether to stop early, given the indices of prompts that have
      ended; unfinished completions are then returned as they are. None to
      finish all.
  """

  params: Any
  names: dict[str, naming.Tensor]
  prompts: Sequence[Sequence[int]]
  sampling: Sequence[dict[str, Any]]
  max_model_len: int
  should_stop: Callable[[Set[int]], bool] | None = None


@dataclasses.dataclass(eq=False)
class _Pending:
  """A request under way.

  Attributes:
    request: the request.
    future: resolves to its completions.
    finished: finished completions by the index of their prompt.
    index_of: indices of unfinished prompts by vLLM's request id.
    unfinished: latest output of unfinished prompts, if `should_stop` needs it.
  """

  request: Request
  future: futures.Future
  finished: dict[int, Completion] = dataclasses.field(default_factory=dict)
  index_of: dict[str, int] = dataclasses.field(default_factory=dict)
  unfinished: dict[int, Completion] = dataclasses.field(default_factory=dict)


class Engine:
  """vLLM in this process, started by its first request.

  Only the engine's own thread calls vLLM: OpenMP counts threads by caller, and
  attention on a CPU fails if two callers have different counts.

  Attributes:
    settings: the settings that it is started with.
    llm: vLLM's own engine, once it is started.
    weight_version: number of parameter updates that vLLM has received.
  """

  def __init__(self, settings: Settings):
    self.settings, self.weight_version = settings, 0
    self.llm, self._max_model_len = None, None
    self._current, self._num_requests = (), 0
    self._changed, self._thread = threading.Condition(), None
    self._closing = False
    self._waiting: collections.deque[_Pending] = collections.deque()
    self._running: list[_Pending] = []
    self._shares_devices, self._asleep = False, False
    self._sleep_requested: futures.Future | None = None

  def submit(self, request: Request) -> futures.Future[list[Completion]]:
    """Submits prompts; they are decoded as soon as there is room.

    Parameters are sent to vLLM only if they are other arrays than last time:
    JAX arrays are immutable.

    Returns:
      A future of one completion a prompt. Cancelling it aborts the prompts that
      have not ended.
    """
    pending = _Pending(request, futures.Future())
    lease = lease_lib.current()
    if lease and self.sleep not in lease.on_release:
      lease.on_release.append(self.sleep)
      self._shares_devices = True
    with self._changed:
      self._waiting.append(pending)
      if not self._thread:
        self._closing = False
        self._thread = threading.Thread(
          target=self._run, name='vllm', daemon=True
        )
        self._thread.start()
        atexit.register(self.close)
      self._changed.notify()
    return pending.future

  def sleep(self):
    """Waits until all requests have ended, then releases device memory.

    An engine that sleeps holds neither parameters, which are sent again, nor
    keys and values. The next request wakes it up.
    """
    with self._changed:
      if not self._thread:
        return
      self._sleep_requested = asleep = futures.Future()
      self._changed.notify()
    asleep.result()

  def close(self):
    """Stops the engine; requests under way fail."""
    with self._changed:
      thread, self._closing = self._thread, True
      self._changed.notify()
    if thread:
      thread.join()

  # The methods below run on the engine's thread.

  def _run(self):
    """Starts waiting requests, and steps vLLM while there is work."""
    while True:
      with self._changed:
        while not self._has_work():
          self._changed.wait()
        if self._closing:
          break
      try:
        self._abort_cancelled()
        self._start_waiting()
        self._step()
        self._maybe_sleep()
      except BaseException as error:  # noqa: BLE001 (waiting callers need it)
        self._fail_all(error)
    self._fail_all(RuntimeError('vLLM was closed.'))
    if self.llm:
      self.llm.engine_core.shutdown()
    self.llm, self._thread = None, None

  def _has_work(self) -> bool:
    requests = self._waiting or self._running
    return bool(requests or self._closing or self._sleep_requested)

  def _maybe_sleep(self):
    """Sleeps if this was requested and no request is left."""
    if not self._sleep_requested or self._waiting or self._running:
      return
    if self.llm and not self._asleep:
      # Level 2 drops parameters: restored ones would be a step old.
      self.llm.sleep(level=2)
      self._asleep, self._current = True, ()
    asleep, self._sleep_requested = self._sleep_requested, None
    asleep.set_result(None)

  def _abort_cancelled(self):
    """Aborts the prompts of cancelled requests."""
    for pending in self._running:
      if pending.future.cancelled() and pending.index_of:
        self.llm.abort_request(list(pending.index_of))
    self._running = [x for x in self._running if not x.future.cancelled()]

  def _start_waiting(self):
    """Starts the next requests, as long as they use the current parameters."""
    while self._waiting:
      pending = self._waiting[0]
      request = pending.request
      if pending.future.cancelled():
        self._waiting.popleft()
        continue
      if self._running and not self._has_params(request.params):
        return
      self._waiting.popleft()
      try:
        self._open(request.max_model_len)
        self._send(request.params, request.names)
        self._running.append(pending)
        self._add(pending)
      except Exception as error:  # noqa: BLE001 (other requests continue)
        self._fail(pending, error)

  def _add(self, pending: _Pending):
    """Adds the prompts of a request to vLLM."""
    import vllm
    from vllm import sampling_params

    request, kinds = pending.request, sampling_params.RequestOutputKind
    kind = kinds.CUMULATIVE if request.should_stop else kinds.FINAL_ONLY
    pairs = zip(request.prompts, request.sampling, strict=True)
    for i, (prompt, sampling) in enumerate(pairs):
      params = vllm.SamplingParams(
        **sampling,
        logprobs=0,  # Of the sampled token only.
        flat_logprobs=True,
        ignore_eos=True,  # `stop_token_ids` has all end tokens.
        detokenize=False,
        output_kind=kind,
      )
      name = str(self._num_requests)
      self._num_requests += 1
      self.llm.add_request(name, {'prompt_token_ids': prompt}, params)
      pending.index_of[name] = i
    # A request without prompts, or that should stop at once, is done already.
    self._resolve(pending)

  def _step(self):
    """Steps vLLM, and resolves requests that have ended."""
    if not self._running:
      return
    for output in self.llm.step():
      name = output.request_id
      for pending in self._running:
        if (i := pending.index_of.get(name)) is not None:
          if output.finished:
            pending.finished[i] = self.checked(i, output.outputs[0])
            del pending.index_of[name]
          else:
            pending.unfinished[i] = _completion(output.outputs[0])
    for pending in self._running:
      self._resolve(pending)
    # `_abort_cancelled` handles those that were cancelled meanwhile.
    self._running = [
      x for x in self._running if x.future.cancelled() or not x.future.done()
    ]

  def _resolve(self, pending: _Pending):
    """Resolves a request if all its prompts have ended, or enough of them."""
    should_stop = pending.request.should_stop
    if (
      pending.index_of and should_stop and should_stop(pending.finished.keys())
    ):
      self.llm.abort_request(list(pending.index_of))
      for i in pending.index_of.values():
        latest = pending.unfinished.get(i, Completion((), (), False))
        pending.finished[i] = latest
      pending.index_of.clear()
    future, finished = pending.future, pending.finished
    if (
      not pending.index_of
      and not future.done()
      and future.set_running_or_notify_cancel()
    ):
      future.set_result([finished[i] for i in range(len(finished))])

  def _fail(self, pending: _Pending, error: BaseException):
    """Fails a request."""
    if pending in self._running:
      self._running.remove(pending)
    if pending.index_of and self.llm:
      self.llm.abort_request(list(pending.index_of))
    future = pending.future
    if not future.done() and future.set_running_or_notify_cancel():
      future.set_exception(error)

  def _fail_all(self, error: BaseException):
    """Fails all requests."""
    for pending in tuple(self._running):
      self._fail(pending, error)
    while self._waiting:
      self._fail(self._waiting.popleft(), error)
    if self._sleep_requested:
      asleep, self._sleep_requested = self._sleep_requested, None
      asleep.set_exception(error)

  def checked(self, i: int, output) -> Completion:
    """The completion of prompt `i`.

    Raises:
      RuntimeError: if vLLM aborted it, or used outdated parameters.
    """
    if output.finish_reason not in ('stop', 'length'):
      raise RuntimeError(
        f'vLLM aborted row {i} after {len(output.token_ids)} tokens: '
        f'{output.finish_reason!r}.'
      )
    used = {span.version for span in output.weight_versions}
    if used != {str(self.weight_version)}:
      raise RuntimeError(
        f'vLLM completed row {i} with parameters of version {sorted(used)}, '
        f'but the latest version is {self.weight_version}.'
      )
    return _completion(output)

  def _has_params(self, params) -> bool:
    """Whether vLLM has these very arrays."""
    leaves = jax.tree.leaves(params)
    return len(leaves) == len(self._current) and all(
      x is current() for x, current in zip(leaves, self._current, strict=True)
    )

  def _send(self, params, names):
    """Sends `params` to vLLM, unless it has them already."""
    if self._has_params(params):
      return
    from rlinf_jax.engines import vllm_weights

    as_torch = jax.tree.map(vllm_weights.tensor, params)
    tensors = dict(weights.checkpoint_tensors(as_torch, names))
    # A tied output layer has a packed copy of its own, which needs an update.
    embed, unembed = names['embed_VD'].name, names['unembed_DV'].name
    tensors.setdefault(unembed, tensors[embed])
    self._current = ()
    call = self.llm.collective_rpc
    call('start_weight_update')
    call('update_weights', kwargs={'update_info': {'tensors': tensors}})
    call('finish_weight_update')
    self.weight_version += 1
    self.llm.set_weight_version(str(self.weight_version))
    self.llm.reset_prefix_cache(reset_running_requests=True)
    self._current = tuple(map(weakref.ref, jax.tree.leaves(params)))

  def _open(self, max_model_len: int):
    """Starts or wakes vLLM, and checks that requests of this length fit."""
    if not self.llm:
      self._max_model_len = self.settings.max_model_len or max_model_len
    if max_model_len > self._max_model_len:
      raise ValueError(
        f'A prompt and its completion may have {max_model_len} tokens here, '
        f'but vLLM was started for {self._max_model_len}: set max_model_len of '
        'the engine.'
      )
    if not self.llm:
      self.llm = vllm_start.start(
        self.settings, self._max_model_len, self._shares_devices
      )
      self._current, self._asleep = (), False
      from rlinf_jax.engines import vllm_weights

      vllm_weights.sync_omp_threads()
    if self._asleep:
      self.llm.wake_up()
      self._asleep = False


def _completion(output) -> Completion:
  """A copy of vLLM's output so far, which vLLM extends in place."""
  return Completion(
    tuple(output.token_ids),
    tuple(output.logprobs.logprobs),
    output.finish_reason == 'stop',
  )


get = functools.cache(Engine)  # One engine a process for equal settings.
