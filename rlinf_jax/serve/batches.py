"""Batches of requests before one model: a thread that decodes for all of them.

Requests that wait when a batch ends become the next one. Batches have few
shapes, so that few programs compile: two for each length of prompts, for one
row and for the most rows.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import queue
import sys
import threading
import time
import traceback
from typing import Any

import jax
import numpy as np

from stages import base
from stages.language import sample, tokens
from stages.language.decoding import chunks
from stages.models import transformer

CHUNK = 16  # Tokens between looks at the rows.
LINGER = 0.003  # Seconds in which requests join a batch.
MAX_WAITING = 1024  # Requests; more are refused.
CLOSED = 'The server ends: send requests to another one.'


class BusyError(Exception):
  """A request cannot wait, as too many do or the server ends."""


@dataclasses.dataclass(eq=False)
class Job:
  """One completion of one prompt.

  Attributes:
    prompt: ids of the prompt.
    limit: most tokens of the completion.
    key: key of its samples.
    temperature: of the sampling; 0 for the likeliest token.
    heard: called in the decoding thread whenever the row has grown, with the
      ids and their log-probabilities so far. Returns whether to go on.
    ended: called in the decoding thread: with the version of the parameters
      once the row has ended, or with the exception that ended the batch, which
      may come after the version.
    is_cancelled: set once its result is not needed.
  """

  prompt: Sequence[int]
  limit: int
  key: Any
  temperature: float
  heard: Callable[[list[int], list[float]], bool]
  ended: Callable[[int | Exception], None]
  is_cancelled: threading.Event = dataclasses.field(
    default_factory=threading.Event
  )


def prompt_lengths(longest: int) -> tuple[int, ...]:
  """Lengths that prompts are padded to: a sixteenth, a quarter, all."""
  return tuple(sorted({max(16, longest // 16), max(16, longest // 4), longest}))


def check_positions(
  config: transformer.Config, prompt_length: int, response_length: int
):
  """Checks that a model has positions for prompts and completions.

  Raises:
    ValueError: if it has too few.
  """
  most, wanted = config.max_positions, prompt_length + response_length
  if most is not None and wanted > most:
    raise ValueError(
      f'A conversation of up to {prompt_length} tokens and a reply of up to '
      f'{response_length} need {wanted} positions, and the model has {most} '
      '(max_position_embeddings in its config.json): lower one of the two '
      '(--prompt_length and --response_length of a server, call_prompt_length '
      'and call_length of agents).'
    )


class Decoder:
  """Decodes batches of jobs in a thread of its own.

  Attributes:
    prompt_length: most tokens of a prompt.
    response_length: most tokens of a completion.
    stop: ids of tokens that end a completion.
    num_programs: most programs that compile.
  """

  def __init__(
    self,
    config: transformer.Config,
    params,
    *,
    version: int = 0,
    stop: tuple[int, ...],
    prompt_length: int,
    response_length: int,
    max_rows: int = 8,
    sampling: sample.Sampling = sample.Sampling(),
  ):
    """Starts the thread.

    Args:
      config: of the model.
      params: its parameters.
      version: optimizer steps that they have seen.
      stop: ids of tokens that end a completion.
      prompt_length: most tokens of a prompt.
      response_length: most tokens of a completion.
      max_rows: completions decoded at once.
      sampling: top-k and top-p of all completions.

    Raises:
      ValueError: if the model lacks positions for so many tokens.
    """
    check_positions(config, prompt_length, response_length)
    self.prompt_length, self.response_length = prompt_length, response_length
    self.stop, self._max_rows = stop, max_rows
    self._lengths = prompt_lengths(prompt_length)
    self.num_programs = 2 * len({1, max_rows}) * len(self._lengths)
    self._newest = params, version
    model = transformer.Transformer(config)
    self._start = jax.jit(
      functools.partial(chunks.start, model, length=response_length)
    )
    self._advance = jax.jit(
      functools.partial(
        chunks.advance, model, num_tokens=CHUNK, stop=stop, sampling=sampling
      )
    )
    self._decoding = threading.Lock()
    self._submitting, self._is_closed = threading.Lock(), False
    self._jobs: queue.Queue[Job | None] = queue.Queue(MAX_WAITING)
    self._thread = threading.Thread(target=self._run, daemon=True)
    self._thread.start()

  def about(self) -> str:
    """A sentence that is printed as the server starts."""
    return (
      f'Up to {self.num_programs} programs compile, each at its first request.'
    )

  def update(self, params, version: int):
    """Gives the parameters of all later batches; None releases them."""
    self._newest = params, version

  def drain(self):
    """Waits for the batch under way; jobs that wait must be cancelled."""
    with self._decoding:
      pass

  def submit(self, job: Job):
    """Lets a job wait for the next batch.

    Raises:
      BusyError: if too many wait, or the decoder was closed.
    """
    try:
      with self._submitting:
        if self._is_closed:
          raise BusyError(CLOSED)
        self._jobs.put_nowait(job)
    except queue.Full:
      raise BusyError(
        f'{MAX_WAITING} requests wait: try again later.'
      ) from None

  def close(self):
    """Ends the thread after the jobs that wait."""
    with self._submitting:
      self._is_closed = True
    self._jobs.put(None)
    self._thread.join()

  def _run(self):
    while (first := self._jobs.get()) is not None:
      time.sleep(LINGER)
      jobs, is_last = [first], False
      while len(jobs) < self._max_rows and not is_last:
        try:
          job = self._jobs.get_nowait()
        except queue.Empty:
          break
        is_last = job is None
        jobs += [] if is_last else [job]
      with self._decoding:
        self._serve(jobs)
      if is_last:
        return

  def _serve(self, jobs: list[Job]):
    """Decodes one batch; its failure ends its own requests alone."""
    params, version = self._newest
    kept = []
    for job in jobs:
      if job.is_cancelled.is_set():
        job.ended(version)
      else:
        kept.append(job)
    try:
      if kept:
        self._decode(params, version, kept)
    except Exception as error:  # noqa: BLE001 (the thread serves the others)
      traceback.print_exception(error, file=sys.stderr)
      for job in jobs:
        job.ended(error)

  def _decode(self, params, version: int, jobs: Sequence[Job]):
    B = 1 if len(jobs) == 1 else self._max_rows
    longest = max(len(job.prompt) for job in jobs)
    P = next(n for n in self._lengths if n >= longest)
    # Rows without a job repeat the first prompt and may have no token.
    padding = [jobs[0]] * (B - len(jobs))
    filled = [*jobs, *padding]
    limit_B = np.array([job.limit for job in jobs] + [0] * len(padding))
    temperature_B = np.array([job.temperature for job in filled], np.float32)
    rows = chunks.Rows(
      key=jax.numpy.stack([job.key for job in filled]),
      temperature=np.where(temperature_B > 0, temperature_B, np.float32(1)),
      greedy=temperature_B == 0,
      limit=limit_B.astype(np.int32),
    )
    prompt: base.Prompt = tokens.pad_left([job.prompt for job in filled], P)
    batch, heard = self._start(params, prompt), [0] * len(jobs)
    while (rows.limit > 0).any():
      batch = self._advance(params, batch, rows)
      now, t = jax.device_get((batch.state.completions, batch.state.t))
      for i, job in enumerate(jobs):
        n = int(now.mask[i].sum())
        goes_on = not job.is_cancelled.is_set()
        if goes_on and n > heard[i]:
          heard[i] = n
          goes_on = job.heard(
            now.action[i, :n].tolist(), now.logp[i, :n].tolist()
          )
        goes_on = goes_on and now.alive[i] and t < limit_B[i]
        if rows.limit[i] and not goes_on:
          rows.limit[i] = 0
          job.ended(version)
