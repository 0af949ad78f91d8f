"""Requests before an engine outside JAX, which decodes them as they come.

It takes the place of `batches.Decoder` where vLLM acts for the policy: a
request joins those under way, and what an earlier call of its session has read
is kept.
"""

import concurrent.futures
import sys
import threading
import traceback
from typing import Any

import jax
import numpy as np

from rlinf_jax.serve import batches
from stages import base
from stages.language import tokens


class Decoder:
  """Hands jobs to an engine; each is a completion of one row.

  A job hears of its tokens once, when the row has ended.

  Attributes:
    prompt_length: most tokens of a prompt.
    response_length: most tokens of a completion.
    stop: ids of tokens that end a completion.
  """

  def __init__(
    self,
    policy: base.Policy,
    *,
    stop: tuple[int, ...],
    prompt_length: int,
    response_length: int,
    max_rows: int,
  ):
    """Starts no thread yet.

    Args:
      policy: whose turns an engine takes.
      stop: ids of tokens that end a completion.
      prompt_length: most tokens of a prompt.
      response_length: most tokens of a completion.
      max_rows: completions that are waited for at once.
    """
    self.prompt_length, self.response_length = prompt_length, response_length
    self.stop, self._policy = stop, policy
    self._newest: tuple[Any, int] = None, 0
    self._waiting = concurrent.futures.ThreadPoolExecutor(max_rows, 'replies')
    # Notified when a job has ended.
    self._lock, self._under_way = threading.Condition(), {}

  def update(self, params, version: int):
    """Gives the parameters of all later jobs."""
    self._newest = params, version

  def submit(self, job: batches.Job):
    """Starts a job, or lets it wait for one of `max_rows` to end."""
    with self._lock:
      self._under_way[job] = None
    self._waiting.submit(self._serve, job, *self._newest)

  def drain(self):
    """Ends the jobs that are cancelled, and waits for all."""
    with self._lock:
      under_way = dict(self._under_way)
    for job, started in under_way.items():
      if job.is_cancelled.is_set() and started is not None:
        started.cancel()
    with self._lock:
      self._lock.wait_for(lambda: not self._under_way)

  def _serve(self, job: batches.Job, params, version: int):
    """Completes the prompt of a job; its failure is its own."""
    try:
      if not job.is_cancelled.is_set():
        found = self._complete(job, params)
        n = int(found.mask.sum())
        if not job.is_cancelled.is_set():
          job.heard(found.action[0, :n].tolist(), found.logp[0, :n].tolist())
      job.ended(version)
    except concurrent.futures.CancelledError:
      job.ended(version)
    except Exception as error:  # noqa: BLE001 (the others go on)
      traceback.print_exception(error, file=sys.stderr)
      job.ended(error)
    finally:
      with self._lock:
        del self._under_way[job]
        self._lock.notify_all()

  def _complete(self, job: batches.Job, params) -> base.Completions:
    """The row of a job, once it has ended."""
    T = min(job.limit, self.response_length)
    empty = base.Completions(
      np.zeros((1, T), np.int32),
      np.zeros((1, T), np.float32),
      np.zeros((1, T), np.float32),
      np.ones(1, bool),
    )
    # One width for all, of which the engine computes the tokens alone.
    prompt = tokens.pad_left([job.prompt], self.prompt_length)
    started = self._policy.resume(
      params,
      prompt,
      jax.random.key_data(job.key)[None],
      empty,
      greedy=job.temperature == 0,
    )
    with self._lock:
      self._under_way[job] = started
    if job.is_cancelled.is_set():  # `drain` may have come before.
      started.cancel()
    return started.result()
