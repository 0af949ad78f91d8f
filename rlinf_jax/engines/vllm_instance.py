"""vLLM once it is started, and the parameters that it has."""

import gc
from multiprocessing import connection
import tempfile
import threading
from typing import Any
import weakref

import jax

from rlinf_jax.engines import vllm_start
from stages import base
from stages.models import adapters, lora
from stages.models.files import naming

_in_process = weakref.WeakSet()  # Open instances that compute in this process.


class Instance:
  """A started vLLM, in this process or in one process a rank.

  Attributes:
    llm: vLLM's own engine.
    max_model_len: maximum tokens of a prompt and its completion together.
    asleep: whether it has released its parameters and its keys and values.
    lora: vLLM's request for the adapter that completions are made with; None
      without one.
  """

  def __init__(
    self,
    settings: vllm_start.Settings,
    max_model_len: int,
    enable_sleep: bool,
  ):
    """Starts vLLM.

    Args:
      settings: of the engine.
      max_model_len: maximum tokens of a prompt and its completion together.
      enable_sleep: whether the engine must be able to release its memory.
    """
    self.llm = vllm_start.start(settings, max_model_len, enable_sleep)
    self.max_model_len, self.asleep, self.lora = max_model_len, False, None
    self._current, self._weights = (), ()
    self._checkpoint, self._folder = settings.checkpoint, None
    self._loads = settings.loads
    from rlinf_jax.engines import vllm_weights, vllm_worker

    vllm_weights.sync_omp_threads()
    self._shared, self._processes, self._dead = None, [], None
    if settings.processes:
      self._shared = vllm_weights.SharedTensors(settings.config.dtype)
      executor = self.llm.engine_core.engine_core.model_executor
      self._processes = [rank.proc for rank in executor.workers]
      threading.Thread(
        target=self._watch, name='vllm ranks', daemon=True
      ).start()
      self.llm.collective_rpc(vllm_worker.ignore_interrupts)
    else:
      _in_process.add(self)
    if settings.loads:
      self.llm.set_weight_version('0')

  def has(self, params) -> bool:
    """Whether vLLM has these very arrays, or for None what it has read."""
    return self._loads if params is None else are(self._current, params)

  def send(self, params, names: dict[str, naming.Tensor], version: int):
    """Sends parameters, of which every rank takes its shard.

    Of an adapted model, the frozen weights are sent once and the adapter alone
    afterwards.

    Args:
      params: parameters of the model.
      names: the checkpoint tensor of each parameter.
      version: completions name it from now on.
    """
    self._current, frozen = (), params
    if lora.is_adapted(params):
      frozen = params[base.FROZEN][lora.PARAMS]
    if not are(self._weights, frozen):
      self._send_weights(frozen, names)
    if frozen is not params:
      self._send_adapter(params)
    self.llm.set_weight_version(str(version))
    if not self.llm.reset_prefix_cache(reset_running_requests=True):
      raise RuntimeError(
        'vLLM keeps keys and values of the parameters before these: it could '
        'not drop them, as completions with them are under way.'
      )
    self._current = references(params)

  def _send_weights(self, params, names):
    """Sends all weights of the model."""
    from rlinf_jax.engines import vllm_weights, vllm_worker

    self._weights = ()
    # A tied output layer has a packed copy of its own, which needs an update.
    embed, unembed = names['embed_VD'].name, names['unembed_DV'].name
    if self._shared:
      sent = self._shared.write(params, names)
      receive = vllm_worker.update_from_memory
    else:
      sent, receive = {}, vllm_worker.update
      for some in vllm_weights.tensors(params, names):
        sent.update(some)
    sent.setdefault(unembed, sent[embed])
    self.llm.collective_rpc(receive, args=(sent,))
    self._weights = references(params)

  def _send_adapter(self, params):
    """Replaces the adapter; ranks read it from a folder."""
    from vllm.lora import request

    self._folder = self._folder or tempfile.TemporaryDirectory()
    adapters.write(self._folder.name, params, self._checkpoint)
    adapter = request.LoRARequest('adapter', 1, self._folder.name)
    adapter.load_inplace = True
    self.llm.add_lora(adapter)
    # Completions name it without loading it again.
    self.lora = request.LoRARequest('adapter', 1, self._folder.name)

  def sleep(self):
    """Releases device memory; it holds no parameters afterwards."""
    # Level 2 drops parameters: restored ones would be a step old.
    self.llm.sleep(level=2)
    self.asleep, self._current, self._weights = True, (), ()

  def wake(self):
    """Takes device memory again, if it sleeps."""
    if self.asleep:
      self.llm.wake_up()
      self.asleep = False

  def close(self):
    """Ends vLLM and the processes of its ranks."""
    processes, self._processes = self._processes, []
    client, core = self.llm.engine_core, self.llm.engine_core.engine_core
    client._finalizer.detach()  # It would call `core.shutdown` later.
    _in_process.discard(self)
    if self._shared or _in_process:
      # `core.shutdown` would also end the communication of other engines that
      # compute in this process, which vLLM keeps in global variables.
      core.model_executor.shutdown()
      core.scheduler.shutdown()
      gc.unfreeze()
    else:
      core.shutdown()
    for process in processes:
      process.join()
    if self._shared:
      self._shared.close()
    if self._folder:
      self._folder.cleanup()

  def death(self) -> str | None:
    """A sentence about the rank that ended first; None while all live."""
    if self._dead is None:
      return None
    rank, process = self._dead
    return (
      f'Rank {rank} of vLLM (process {process.pid}) ended with exit code '
      f'{process.exitcode}, and the completions under way are lost: see its '
      'messages above, and whether the machine ran out of memory. The next '
      'request starts vLLM again.'
    )

  def _watch(self):
    """Waits until a rank ends before `close` ends them all."""
    processes = self._processes
    first = connection.wait([process.sentinel for process in processes])[0]
    if not self._processes:
      return
    for rank, process in enumerate(processes):
      if process.sentinel == first:
        process.join()
        self._dead = rank, process


def references(params: Any) -> tuple[weakref.ref, ...]:
  """Weak references to arrays, which are freed with their last other user."""
  return tuple(map(weakref.ref, jax.tree.leaves(params)))


def are(known: tuple[weakref.ref, ...], params: Any) -> bool:
  """Whether references are to these very arrays."""
  leaves = jax.tree.leaves(params)
  return len(leaves) == len(known) and all(
    x is reference() for x, reference in zip(leaves, known, strict=True)
  )
