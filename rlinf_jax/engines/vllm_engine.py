"""Runs vLLM on a thread of its own.

Requests are submitted and awaited separately, so that later requests are under
way while the results of earlier ones are learned from. Requests with the same
parameters are decoded together; a request with other parameters waits until
those have ended. On a place that shares its devices, vLLM sleeps while another
place uses them.
"""

import atexit
import collections
from collections.abc import Sequence
from concurrent import futures
import functools
import threading

from rlinf_jax.engines import vllm_instance, vllm_request, vllm_start
from rlinf_jax.runtime.places import lease as lease_lib


class Engine:
  """One copy of vLLM, started by its first request.

  Only the engine's own thread calls vLLM: OpenMP counts threads by caller, and
  attention on a CPU fails if two callers have different counts.

  Attributes:
    settings: the settings that it is started with.
    weight_version: number of parameter updates that vLLM has received.
  """

  def __init__(self, settings: vllm_start.Settings):
    self.settings, self.weight_version = settings, 0
    self._instance: vllm_instance.Instance | None = None
    self._num_requests = 0
    self._changed, self._thread = threading.Condition(), None
    self._closing = False
    self._waiting: collections.deque[vllm_request.Pending] = collections.deque()
    self._running: set[vllm_request.Pending] = set()
    self._owner: dict[str, vllm_request.Pending] = {}  # By vLLM's request id.
    # Every step asks these, as rows that end in another engine may stop them.
    self._stoppable: set[vllm_request.Pending] = set()
    self._some_cancelled = False
    self._shares_devices = False
    self._sleep_requested: futures.Future | None = None

  @property
  def llm(self):
    """vLLM's own engine; None before it is started."""
    return self._instance.llm if self._instance else None

  def submit(
    self, request: vllm_request.Request
  ) -> futures.Future[list[vllm_request.Completion]]:
    """Submits prompts; they are decoded as soon as there is room.

    Parameters are sent to vLLM only if they are other arrays than last time:
    JAX arrays are immutable.

    Returns:
      A future of one completion a prompt. Cancelling it aborts the prompts that
      have not ended.
    """
    return self.submit_all([request])[0]

  def submit_all(
    self, requests: Sequence[vllm_request.Request]
  ) -> list[futures.Future[list[vllm_request.Completion]]]:
    """Submits requests, which start together; as `submit`."""
    pending = [
      vllm_request.Pending(request, futures.Future()) for request in requests
    ]
    for x in pending:
      x.future.add_done_callback(self._note_cancelled)
    lease = lease_lib.current()
    if lease and self.sleep not in lease.on_release:
      lease.on_release.append(self.sleep)
      self._shares_devices = True
    with self._changed:
      self._waiting.extend(pending)
      if not self._thread:
        self._closing = False
        self._thread = threading.Thread(
          target=self._run, name='vllm', daemon=True
        )
        self._thread.start()
        atexit.register(self.close)
      self._changed.notify()
    return [x.future for x in pending]

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

  def _note_cancelled(self, future: futures.Future):
    """Has the next step look for cancelled requests, if `future` is of one."""
    if future.cancelled():
      self._some_cancelled = True

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
        self._fail_all(self._explained(error))
    self._fail_all(RuntimeError('vLLM was closed.'))
    self._stop()
    with self._changed:
      # Requests that came meanwhile started no other thread.
      self._fail_all(RuntimeError('vLLM was closed.'))
      self._thread = None

  def _stop(self):
    """Ends vLLM, if it is started."""
    instance, self._instance = self._instance, None
    if instance:
      instance.close()

  def _explained(self, error: BaseException) -> BaseException:
    """`error`, or the end of a rank that caused it; vLLM is ended then."""
    if not self._instance or not (death := self._instance.death()):
      return error
    explained = RuntimeError(death)
    explained.__cause__ = error
    self._stop()  # Nothing is left that could abort requests under way.
    for pending in tuple(self._running):
      self._fail(pending, explained)
    return explained

  def _has_work(self) -> bool:
    requests = self._waiting or self._running
    return bool(requests or self._closing or self._sleep_requested)

  def _maybe_sleep(self):
    """Sleeps if this was requested and no request is left."""
    if not self._sleep_requested or self._waiting or self._running:
      return
    if self._instance and not self._instance.asleep:
      self._instance.sleep()
    asleep, self._sleep_requested = self._sleep_requested, None
    asleep.set_result(None)

  def _abort_cancelled(self):
    """Aborts the prompts of cancelled requests."""
    if not self._some_cancelled:
      return
    self._some_cancelled = False  # First: others may be cancelled meanwhile.
    for pending in tuple(self._running):
      if pending.future.cancelled():
        self._end(pending)

  def _start_waiting(self):
    """Starts the next requests, as long as they use the current parameters."""
    while self._waiting:
      pending = self._waiting[0]
      request = pending.request
      if pending.future.cancelled():
        self._waiting.popleft()
        continue
      if self._running and not self._instance.has(request.params):
        return
      self._waiting.popleft()
      try:
        self._open(request.max_model_len)
        self._send(request.params, request.names)
        self._running.add(pending)
        if request.should_stop:
          self._stoppable.add(pending)
        self._add(pending)
      except Exception as error:  # noqa: BLE001 (other requests continue)
        self._fail(pending, self._explained(error))

  def _add(self, pending: vllm_request.Pending):
    """Adds the prompts of a request to vLLM."""
    import vllm
    from vllm import sampling_params

    request, kinds = pending.request, sampling_params.RequestOutputKind
    as_they_come = request.should_stop or request.heard or request.stop_texts
    kind = kinds.DELTA if as_they_come else kinds.FINAL_ONLY
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
      self.llm.add_request(
        name,
        {'prompt_token_ids': prompt},
        params,
        lora_request=self._instance.lora,
      )
      pending.index_of[name], self._owner[name] = i, pending
    # A request without prompts, or that should stop at once, is done already.
    self._resolve(pending)

  def _step(self):
    """Steps vLLM, and resolves requests that have ended.

    It visits those with new tokens, as there may be hundreds of others.
    """
    if not self._running:
      return
    changed = set(self._stoppable)
    for output in self.llm.step():
      if (pending := self._owner.get(output.request_id)) is not None:
        self._hear(pending, output)
        changed.add(pending)
    for pending in changed:
      self._resolve(pending)

  def _hear(self, pending: vllm_request.Pending, output):
    """Adds new tokens to the request that they are of."""
    i, new = pending.index_of[output.request_id], output.outputs[0]
    at_text = pending.add(i, new.token_ids, new.logprobs.logprobs)
    if not (at_text or output.finished):
      return
    if output.finished:
      self.check(i, new)
    else:
      self.llm.abort_request([output.request_id])
    ended, kept = new.finish_reason == 'stop', output.num_cached_tokens or 0
    pending.finished[i] = pending.completion(i, at_text or ended, kept)
    del pending.index_of[output.request_id], pending.tokens[i]
    del self._owner[output.request_id]

  def _resolve(self, pending: vllm_request.Pending):
    """Resolves a request if all its prompts have ended, or enough of them."""
    future, finished = pending.future, pending.finished
    if pending.index_of:
      should_stop = pending.request.should_stop
      if not (should_stop and should_stop(finished.keys())):
        return
      for i in pending.index_of.values():
        finished[i] = pending.completion(i, False)
    self._end(pending)
    if not future.done() and future.set_running_or_notify_cancel():
      future.set_result([finished[i] for i in range(len(finished))])

  def _end(self, pending: vllm_request.Pending):
    """Ends a request, and aborts its prompts that have not ended."""
    if pending.index_of and self.llm:
      self.llm.abort_request(list(pending.index_of))
    for name in pending.index_of:
      del self._owner[name]
    pending.index_of.clear()
    self._running.discard(pending)
    self._stoppable.discard(pending)

  def _fail(self, pending: vllm_request.Pending, error: BaseException):
    """Fails a request."""
    self._end(pending)
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

  def check(self, i: int, output):
    """Raises RuntimeError for a prompt that vLLM completed wrongly.

    Args:
      i: number of the prompt.
      output: of vLLM, which aborted it, or used outdated parameters.
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

  def _send(self, params, names):
    """Sends `params` to vLLM, unless it has them already."""
    if self._instance.has(params):
      return
    self._instance.send(params, names, self.weight_version + 1)
    self.weight_version += 1

  def _open(self, max_model_len: int):
    """Starts or wakes vLLM, and checks that requests of this length fit."""
    limit = self.settings.max_model_len or max_model_len
    if self._instance:
      limit = self._instance.max_model_len
    if max_model_len > limit:
      raise ValueError(
        f'A prompt and its completion may have {max_model_len} tokens here, '
        f'but vLLM was started for {limit}: set max_model_len of the engine.'
      )
    if not self._instance:
      self._instance = vllm_instance.Instance(
        self.settings, limit, self._shares_devices
      )
    self._instance.wake()


get = functools.cache(Engine)  # One engine a process for equal settings.
