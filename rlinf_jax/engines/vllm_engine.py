"""vLLM, at work on a thread of its own.

Calls are asked for and waited for apart, so that a second one is under way
while what came of the first is learned from: requests of all that act by the
same parameters are decoded together, and whoever asks for others waits until
those have ended. Where it acts at a place that shares devices, it sleeps while
another place has them.
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
from stages.models import weights


@dataclasses.dataclass(frozen=True)
class Settings:
  """What tells engines apart.

  Attributes:
    checkpoint: a folder, of which the configuration is read.
    dtype: of its arithmetic.
    rows: most completions at work at once.
    memory: bytes for keys and values.
    context: most tokens of a prompt and its completion; those of the first call
      if None.
  """

  checkpoint: str
  dtype: str
  rows: int
  memory: int
  context: int | None


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


class Ask(NamedTuple):
  """A call: some prompts, to be completed by some parameters.

  Attributes:
    params: to complete them by.
    names: the tensor of a checkpoint behind each parameter.
    prompts: token ids.
    hows: for each prompt, arguments of vLLM's `SamplingParams`.
    context: most tokens of a prompt and its completion.
    until: whether it is enough, given the places of the prompts that have
      ended: what has not is handed out as far as it is. None for all.
  """

  params: Any
  names: dict[str, weights.Tensor]
  prompts: Sequence[Sequence[int]]
  hows: Sequence[dict[str, Any]]
  context: int
  until: Callable[[Set[int]], bool] | None = None


@dataclasses.dataclass(eq=False)
class _Call:
  """An `Ask` under way.

  Attributes:
    ask: which.
    told: its completions, when all are there.
    made: those that are there, by the places of their prompts.
    begun: what there is of the others, where that is asked for.
    left: places of the prompts that are not, by names of vLLM's requests.
  """

  ask: Ask
  told: futures.Future
  made: dict[int, Completion] = dataclasses.field(default_factory=dict)
  left: dict[str, int] = dataclasses.field(default_factory=dict)
  begun: dict[int, Completion] = dataclasses.field(default_factory=dict)


class Engine:
  """vLLM in this process, opened by its first call.

  Nobody but its thread calls vLLM: OpenMP counts threads by caller, and
  attention on a CPU fails where two callers count differently.

  Attributes:
    settings: what it is opened with.
    llm: vLLM's own engine, when it is open.
    sent: how often it was sent parameters: the version of those that it has.
  """

  def __init__(self, settings: Settings):
    self.settings, self.sent = settings, 0
    self.llm, self._context = None, None
    self._has, self._asked = (), 0
    self._news, self._thread, self._closing = threading.Condition(), None, False
    self._waiting: collections.deque[_Call] = collections.deque()
    self._working: list[_Call] = []
    self._shares, self._asleep = False, False
    self._resting: futures.Future | None = None

  def ask(self, ask: Ask) -> futures.Future[list[Completion]]:
    """Begins to complete prompts, at once as far as there is room.

    Parameters are sent only if they are other arrays than last time, as an
    array of JAX never changes.

    Returns:
      The future of a completion a prompt. If it is cancelled, what has not
      ended is given up.
    """
    call = _Call(ask, futures.Future())
    lease = lease_lib.current()
    if lease and self.rest not in lease.on_release:
      lease.on_release.append(self.rest)
      self._shares = True
    with self._news:
      self._waiting.append(call)
      if not self._thread:
        self._closing = False
        self._thread = threading.Thread(
          target=self._work, name='vllm', daemon=True
        )
        self._thread.start()
        atexit.register(self.close)
      self._news.notify()
    return call.told

  def rest(self):
    """Returns when calls have ended and it sleeps; the next one wakes it.

    Asleep it holds no memory of devices: neither parameters, which it is sent
    again, nor keys and values.
    """
    with self._news:
      if not self._thread:
        return
      self._resting = resting = futures.Future()
      self._news.notify()
    resting.result()

  def close(self):
    """Ends it; who waits is told."""
    with self._news:
      thread, self._closing = self._thread, True
      self._news.notify()
    if thread:
      thread.join()

  # Of its thread alone.

  def _work(self):
    """Takes up what is asked for, and steps vLLM as long as there is work."""
    while True:
      with self._news:
        while not self._has_to_do():
          self._news.wait()
        if self._closing:
          break
      try:
        self._forget()
        self._take_up()
        self._step()
        self._fall_asleep()
      except BaseException as error:  # noqa: BLE001 (whoever waits must know)
        self._give_up(error)
    self._give_up(RuntimeError('vLLM was closed.'))
    if self.llm:
      self.llm.engine_core.shutdown()
    self.llm, self._thread = None, None

  def _has_to_do(self) -> bool:
    work = self._waiting or self._working
    return bool(work or self._closing or self._resting)

  def _fall_asleep(self):
    """Goes to sleep if it was told to, and nothing is left to do."""
    if not self._resting or self._waiting or self._working:
      return
    if self.llm and not self._asleep:
      # Parameters that come back would be those of a step ago.
      self.llm.sleep(level=2)
      self._asleep, self._has = True, ()
    resting, self._resting = self._resting, None
    resting.set_result(None)

  def _forget(self):
    """Gives up requests of calls that nobody waits for any more."""
    for call in self._working:
      if call.told.cancelled() and call.left:
        self.llm.abort_request(list(call.left))
    self._working = [x for x in self._working if not x.told.cancelled()]

  def _take_up(self):
    """Hands vLLM the next calls, as long as they are by what it has."""
    while self._waiting:
      call = self._waiting[0]
      if call.told.cancelled():
        self._waiting.popleft()
        continue
      if self._working and not self._acts_by(call.ask.params):
        return
      self._waiting.popleft()
      try:
        self._open(call.ask.context)
        self._send(call.ask.params, call.ask.names)
        self._working.append(call)
        self._request(call)
      except Exception as error:  # noqa: BLE001 (other calls go on)
        self._drop(call, error)

  def _request(self, call: _Call):
    import vllm
    from vllm import sampling_params

    kinds = sampling_params.RequestOutputKind
    kind = kinds.CUMULATIVE if call.ask.until else kinds.FINAL_ONLY
    pairs = zip(call.ask.prompts, call.ask.hows, strict=True)
    for i, (prompt, how) in enumerate(pairs):
      params = vllm.SamplingParams(
        **how,
        logprobs=0,  # That of what was drawn, and no other.
        flat_logprobs=True,
        ignore_eos=True,  # `stop_token_ids` says all.
        detokenize=False,
        output_kind=kind,
      )
      name = str(self._asked)
      self._asked += 1
      self.llm.add_request(name, {'prompt_token_ids': prompt}, params)
      call.left[name] = i
    self._tell(call)  # Where nothing was asked for, or what there is is enough.

  def _step(self):
    """A step of vLLM; hands out what has ended."""
    if not self._working:
      return
    for made in self.llm.step():
      for call in self._working:
        if (i := call.left.get(made.request_id)) is not None:
          if made.finished:
            call.made[i] = self.checked(i, made.outputs[0])
            del call.left[made.request_id]
          else:
            call.begun[i] = _completion(made.outputs[0])
    for call in self._working:
      self._tell(call)
    self._working = [  # `_forget` sees to those that were cancelled meanwhile.
      x for x in self._working if x.told.cancelled() or not x.told.done()
    ]

  def _tell(self, call: _Call):
    """Hands out the completions of a call that has all of them, or enough."""
    until = call.ask.until
    if call.left and until and until(call.made.keys()):
      self.llm.abort_request(list(call.left))
      for i in call.left.values():
        call.made[i] = call.begun.get(i, Completion((), (), False))
      call.left.clear()
    if (
      not call.left
      and not call.told.done()
      and call.told.set_running_or_notify_cancel()
    ):
      call.told.set_result([call.made[i] for i in range(len(call.made))])

  def _drop(self, call: _Call, error: BaseException):
    """Has a call fail."""
    if call in self._working:
      self._working.remove(call)
    if call.left and self.llm:
      self.llm.abort_request(list(call.left))
    if not call.told.done() and call.told.set_running_or_notify_cancel():
      call.told.set_exception(error)

  def _give_up(self, error: BaseException):
    """Has all calls fail."""
    for call in tuple(self._working):
      self._drop(call, error)
    while self._waiting:
      self._drop(self._waiting.popleft(), error)
    if self._resting:
      resting, self._resting = self._resting, None
      resting.set_exception(error)

  def checked(self, i: int, made) -> Completion:
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
    return _completion(made)

  def _acts_by(self, params) -> bool:
    """Whether it has these very arrays."""
    leaves = jax.tree.leaves(params)
    return len(leaves) == len(self._has) and all(
      x is had() for x, had in zip(leaves, self._has, strict=True)
    )

  def _send(self, params, names):
    """Makes it act by `params`, if it does not already."""
    if self._acts_by(params):
      return
    from rlinf_jax.engines import vllm_weights

    there = jax.tree.map(vllm_weights.tensor, params)
    tensors = dict(weights.checkpoint_tensors(there, names))
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
    self._has = tuple(map(weakref.ref, jax.tree.leaves(params)))

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
      self.llm = vllm_start.started(self.settings, self._context, self._shares)
      self._has, self._asleep = (), False
      from rlinf_jax.engines import vllm_weights

      vllm_weights.agree_on_threads()
    if self._asleep:
      self.llm.wake_up()
      self._asleep = False


def _completion(made) -> Completion:
  """As far as vLLM has come; copies, as it goes on."""
  return Completion(
    tuple(made.token_ids),
    tuple(made.logprobs.logprobs),
    made.finish_reason == 'stop',
  )


of = functools.cache(Engine)  # One a process, however often it is asked for.
