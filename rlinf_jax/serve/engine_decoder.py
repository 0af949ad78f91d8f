"""Requests before an engine outside JAX, which decodes them as they come.

It takes the place of `batches.Decoder` where vLLM acts for the policy: a
request joins those under way, and what an earlier call of its session has read
is kept.
"""

import concurrent.futures
import queue
import sys
import threading
import time
import traceback
from typing import Any

import jax
import numpy as np

from rlinf_jax.serve import batches
import stages
from stages import base
from stages.language import tokens

LINGER = 0.02  # Seconds in which tokens come before a job hears of them.
PATIENCE = 0.2  # Seconds after which a job that hears nothing may be cancelled.
MAX_WAITING = 1024  # Requests; more are refused.


class Decoder:
  """Hands jobs to an engine; each is a completion of one row.

  Attributes:
    prompt_length: most tokens of a prompt.
    response_length: most tokens of a completion.
    stop: ids of tokens that end a completion.
    max_rows: most completions at once.
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
    self.max_rows = max_rows
    # Until `update`, the engine uses parameters that it has read itself.
    self._newest: tuple[Any, int] = None, 0
    self._waiting = concurrent.futures.ThreadPoolExecutor(max_rows, 'replies')
    # Notified when a job has ended.
    self._lock, self._num_jobs = threading.Condition(), 0

  def about(self) -> str:
    """A sentence that is printed as the server starts."""
    return f'vLLM decodes up to {self.max_rows} replies at once.'

  def update(self, params, version: int):
    """Gives the parameters of all later jobs; None releases them."""
    self._newest = params, version

  def submit(self, job: batches.Job):
    """Starts a job, or lets it wait for one of `max_rows` to end.

    Raises:
      BusyError: if too many wait, or the decoder was closed.
    """
    with self._lock:
      if self._num_jobs >= self.max_rows + MAX_WAITING:
        raise batches.BusyError(
          f'{MAX_WAITING} requests wait: try again later.'
        )
      try:
        self._waiting.submit(self._serve, job, *self._newest)
      except RuntimeError:  # It is shut down.
        raise batches.BusyError(batches.CLOSED) from None
      self._num_jobs += 1

  def drain(self):
    """Waits for all jobs; those that are not needed must be cancelled."""
    with self._lock:
      self._lock.wait_for(lambda: not self._num_jobs)

  def close(self):
    """Ends the threads, once no job is left."""
    self._waiting.shutdown()

  def try_out(self):
    """Completes a prompt by a token, so that an engine that fails does so now.

    Raises:
      Exception: that of the engine.
      ValueError: if the log-probability of the token is no number.
    """
    ended: concurrent.futures.Future = concurrent.futures.Future()
    key, found = jax.random.key(0), []

    def heard(ids, logp):
      found[:] = logp
      return True

    self.submit(
      batches.Job([self.stop[0]], 1, key, 0.0, heard, ended.set_result)
    )
    if isinstance(result := ended.result(), Exception):
      raise result
    if not np.isfinite(found).all():
      raise ValueError(
        f'The model gives its likeliest token a log-probability of {found[0]}: '
        'its weights have values that are NaN or infinite. Copy the model '
        'again, or take an earlier one.'
      )

  def _serve(self, job: batches.Job, params, version: int):
    """Completes the prompt of a job; its failure is its own."""
    try:
      if not job.is_cancelled.is_set():
        self._complete(job, params)
      job.ended(version)
    except Exception as error:  # noqa: BLE001 (the others go on)
      traceback.print_exception(error, file=sys.stderr)
      job.ended(error)
    finally:
      with self._lock:
        self._num_jobs -= 1
        self._lock.notify_all()

  def _complete(self, job: batches.Job, params):
    """Tells a job of its tokens as they come, until it has enough of them."""
    news: queue.SimpleQueue = queue.SimpleQueue()
    row = self._start(job, params, news)
    row.future.add_done_callback(lambda _: news.put(None))
    ids, logp, goes_on = [], [], True
    while goes_on:
      parts, goes_on = _next(news, job.is_cancelled)
      for some, of_some in parts:
        ids.extend(some)
        logp.extend(of_some)
      if parts and not job.heard([*ids], [*logp]):
        goes_on = False
    row.cancel()  # Of a row that has not ended, no more is needed.
    try:
      row.result()
    except concurrent.futures.CancelledError:
      pass

  def _start(
    self, job: batches.Job, params, news: queue.SimpleQueue
  ) -> stages.Deferred:
    """Lets the engine complete the prompt of a job, and put what is new."""
    T = min(job.limit, self.response_length)
    empty = base.Completions(
      np.zeros((1, T), np.int32),
      np.zeros((1, T), np.float32),
      np.zeros((1, T), np.float32),
      np.ones(1, bool),
    )
    # One width for all, of which the engine computes the tokens alone.
    prompt = tokens.pad_left([job.prompt], self.prompt_length)
    return self._policy.resume(
      params,
      prompt,
      jax.random.key_data(job.key)[None],
      empty,
      temperature=job.temperature,
      heard=lambda *new: news.put(new),
    )


def _next(
  news: queue.SimpleQueue, is_cancelled: threading.Event
) -> tuple[list[tuple], bool]:
  """New tokens of a row, and whether more may come.

  Waits until something has, or the job is cancelled.
  """
  while not is_cancelled.is_set():
    try:
      parts = [news.get(timeout=PATIENCE)]
    except queue.Empty:
      continue
    if parts != [None]:
      time.sleep(LINGER)
    while not news.empty():
      parts.append(news.get())
    return [part for part in parts if part is not None], parts[-1] is not None
  return [], False
