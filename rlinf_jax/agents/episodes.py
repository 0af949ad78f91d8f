"""Batches of text environments, as the host stage of a conversation.

The environment of a row is found by the row's id and by all that was said to
it. Where it is not found, as after a restart or in another process, a new one
is given the texts of the conversation once more. So the stage is a function of
its arguments, and a plan may cut, place or repeat it.
"""

import collections
from collections.abc import Sequence
import concurrent.futures
import functools
import json
import sys
import threading
from typing import Any, NamedTuple
import zlib

import jax
import numpy as np

from rlinf_jax.agents import base, deadline, formats
from rlinf_jax.data import text_arrays
import stages
from stages import ranges
from stages.language import conversation, tokens

MAX_LIVE = 2**16  # Environments that are kept; the oldest are made anew.
MAX_CALLS = 8  # Calls of the stage at once, such as of the pieces of a batch.
# With slots, the policy goes on with 1 / SHARE of the unfinished rows.
SHARE = 4


def envs(
  checkpoint: str,
  make: base.Make,
  *,
  max_answer_tokens: ranges.PositiveInt,
  chat: bool = True,
  step_timeout: ranges.PositiveFloat = 60.0,
  num_threads: ranges.PositiveInt = 8,
  slots: ranges.PositiveInt | None = None,
  answer_seconds: str | None = None,
) -> conversation.TextEnvs:
  """Text environments for `conversation.converse`.

  A step that raises or is late ends its own episode, without reward and masked
  from every loss, and is counted in the term `env_failed`.

  Args:
    checkpoint: folder of the model whose tokenizer to use.
    make: makes one environment.
    max_answer_tokens: most tokens that an environment says to a turn; an
      episode with a longer answer is truncated.
    chat: whether to render messages by the chat template, as in `formats`.
    step_timeout: seconds that a step of an environment may take. In a first
      turn that includes making and resetting it, and after a restart also the
      turns before, which are said to it again.
    num_threads: steps of environments at once.
    slots: rows that the policy continues at once, while environments of others
      work; it goes on as soon as they are full again, or a quarter of the
      unfinished rows can go on. None to continue all rows together, when the
      last of them has its answer.
    answer_seconds: file to which the seconds of each step are appended, one a
      line, for `--answer_seconds` of plans; None to write none.
  """
  tokenizer = tokens.load_tokenizer(checkpoint)
  terms = base.terms(make())
  if answer_seconds is not None:
    open(answer_seconds, 'a').close()  # Fails here rather than in a step.
  pool = deadline.Pool(num_threads, step_timeout)
  step = _Steps(make, pool, answer_seconds)
  write = functools.partial(_ids, tokenizer, chat, max_answer_tokens)

  def reply(answer: np.ndarray, now: conversation.Conversation):
    row_B = np.flatnonzero(now.waits)
    problems = text_arrays.unpack(answer[row_B])
    turns = [
      Turn(now.id[i].tobytes(), problem, _texts(tokenizer, now, i))
      for i, problem in zip(row_B, problems, strict=True)
    ]
    has_turn_B = np.asarray(conversation.has_turn(now.completions))
    ready = int(has_turn_B.sum())
    # Limits of tokens or turns have ended the others.
    step.drop([x.tobytes() for x in now.id[~has_turn_B & ~(now.waits > 0)]])
    count = _awaited(slots, len(turns), ready)

    return stages.Deferred(
      _executor().submit(step, turns, count),
      functools.partial(_reply, write, terms, now.own.shape[0], row_B),
    )

  def out_shapes(answer, now: conversation.Conversation):
    del answer
    shape = jax.eval_shape(
      lambda: _empty(now.own.shape[0], max_answer_tokens, terms, jax.numpy)
    )
    return shape

  stage = stages.Stage(
    reply,
    'environment',
    host=True,
    out_shapes=out_shapes,
    asynchronous=True,
    awaited=functools.partial(_awaited, slots),
  )
  return conversation.TextEnvs(stage, max_answer_tokens, terms, slots)


def _awaited(slots: int | None, waiting: int, ready: int = 0) -> int:
  """Number of answers to wait for before decoding goes on.

  Args:
    slots: as in `envs`.
    waiting: rows that wait for an answer.
    ready: rows that have the turn.
  """
  if slots is None:
    return waiting
  enough = min(slots, -(-(waiting + ready) // SHARE))
  return min(waiting, max(0, enough - ready))


class Turn(NamedTuple):
  """A turn that an environment answers.

  Attributes:
    id: of its row.
    problem: JSON of the problem.
    texts: all turns of the episode so far; the last is new.
  """

  id: bytes
  problem: str
  texts: tuple[str, ...]


Step = base.TimeStep | Exception  # An exception where a step failed.


class _Stepped(NamedTuple):
  """A step, and the episode after it."""

  step: base.TimeStep
  episode: '_Episode'


class _Episode(NamedTuple):
  """An environment, and what was said to it."""

  env: base.TextEnv
  problem: str
  texts: tuple[str, ...]


class _Steps:
  """Steps environments, and keeps those whose episodes go on."""

  def __init__(
    self, make: base.Make, pool: deadline.Pool, record: str | None = None
  ):
    self._make, self._pool, self._record = make, pool, record
    self._live: collections.OrderedDict[bytes, _Episode] = (
      collections.OrderedDict()
    )
    self._calls: collections.OrderedDict[Turn, deadline.Call] = (
      collections.OrderedDict()
    )
    self._lock, self._failed = threading.Lock(), False

  def __call__(self, turns: Sequence[Turn], count: int) -> list[Step | None]:
    """Answers to turns; None where there is none yet, of all but `count`.

    A turn without an answer is asked for again, and its step goes on meanwhile.
    """
    with self._lock:
      calls = [self._call(turn) for turn in turns]
    self._pool.wait(calls, count)
    # Read once: other calls end meanwhile.
    results = [call.result for call in calls]
    with self._lock:
      self._write([
        call.seconds
        for call, result in zip(calls, results, strict=True)
        if result is not None
      ])  # fmt: skip
      for turn, result in zip(turns, results, strict=True):
        if result is not None:
          self._calls.pop(turn, None)
        if isinstance(result, _Stepped):
          self._keep(turn.id, result)
    steps = [x.step if isinstance(x, _Stepped) else x for x in results]
    self._report(steps)
    return steps

  def drop(self, ids: Sequence[bytes]):
    """Forgets episodes that have ended without their environments' doing."""
    with self._lock:
      for id_ in ids:
        self._live.pop(id_, None)

  def _keep(self, id_: bytes, result: '_Stepped'):
    """Keeps an episode for its next turn, if there may be one."""
    if result.step.terminated or result.step.truncated:
      return
    self._live[id_] = result.episode
    while len(self._live) > MAX_LIVE:
      self._live.popitem(last=False)

  def _call(self, turn: Turn) -> deadline.Call:
    """The step of a turn, which starts unless it is under way."""
    if turn not in self._calls:
      self._calls[turn] = self._pool.submit(self._step, turn)
      if len(self._calls) > MAX_LIVE:
        self._calls.popitem(last=False)
    return self._calls[turn]

  def _write(self, seconds: Sequence[float]):
    """Appends the seconds of steps to the record, if there is one."""
    if self._record is not None and seconds:
      with open(self._record, 'a') as file:
        file.writelines(f'{x:.6g}\n' for x in seconds)

  def _report(self, steps: Sequence[Step | None]):
    """Prints the first failure of the run."""
    for step in steps:
      if isinstance(step, Exception) and not self._failed:
        self._failed = True
        print(
          'A text environment failed, which ends its episode without reward '
          f'({type(step).__name__}: {step}).',
          file=sys.stderr,
          flush=True,
        )

  def _step(self, turn: Turn) -> _Stepped:
    """One step of one environment; in a thread."""
    past, text = turn.texts[:-1], turn.texts[-1]
    with self._lock:
      live = self._live.pop(turn.id, None)
    if live is None or (live.problem, live.texts) != (turn.problem, past):
      live = self._replay(turn.problem, past)
    step = live.env.step(text)
    return _Stepped(step, live._replace(texts=turn.texts))

  def _replay(self, problem: str, texts: tuple[str, ...]) -> _Episode:
    """An environment to which `texts` have been said."""
    env = self._make()
    env.reset(json.loads(problem))
    for text in texts:
      env.step(text)
    return _Episode(env, problem, texts)


def _texts(
  tokenizer, now: conversation.Conversation, i: int
) -> tuple[str, ...]:
  """The policy's own turns in row `i`."""
  own_T = np.concatenate([[0], now.own[i] > 0, [0]]).astype(int)
  (start,) = np.nonzero(np.diff(own_T) > 0)
  (end,) = np.nonzero(np.diff(own_T) < 0)
  action_T = now.completions.action[i]
  rows = [action_T[a:b].tolist() for a, b in zip(start, end, strict=True)]
  return tuple(tokenizer.batch_decode(rows, skip_special_tokens=True))


def _ids(
  tokenizer, chat: bool, limit: int, messages: Sequence[base.Message]
) -> list[int]:
  """Tokens of an environment's answer; none if it has more than `limit`."""
  text = formats.answer(tokenizer, messages, chat=chat)
  row = tokenizer(text, add_special_tokens=False)['input_ids']
  return row if len(row) <= limit else []


def _empty(B: int, E: int, terms: Sequence[str], xp: Any) -> conversation.Reply:
  """A reply in which every array is zero."""
  zero_B = lambda: xp.zeros(B, xp.float32)
  return conversation.Reply(
    answered=zero_B(),
    token=xp.zeros((B, E), xp.int32),
    mask=xp.zeros((B, E), xp.int32),
    reward=zero_B(),
    terminated=zero_B(),
    truncated=zero_B(),
    failed=zero_B(),
    terms={name: zero_B() for name in terms},
    state=xp.zeros(B, xp.int32),
  )


def _reply(
  write, terms, B: int, row_B, steps: Sequence[Step | None]
) -> conversation.Reply:
  """Time steps of some rows as arrays of all rows."""
  out = _empty(B, write.args[-1], terms, np)
  for i, step in zip(row_B, steps, strict=True):
    out.answered[i] = step is not None
    if step is None:
      continue
    if isinstance(step, Exception):
      out.failed[i] = 1.0
      continue
    out.reward[i] = step.reward
    out.terminated[i] = step.terminated
    out.truncated[i] = step.truncated
    for name in terms:
      out.terms[name][i] = step.terms.get(name, 0.0)
    if not (step.terminated or step.truncated):
      ids = write(step.messages)
      out.state[i] = _state_number(step)
      out.token[i, : len(ids)] = ids
      out.mask[i, : len(ids)] = 1
  return out


def _state_number(step: base.TimeStep) -> int:
  """A number of 31 bits, which is never 0 as that of the prompt is."""
  name = step.state
  if name is None:
    name = json.dumps([x.get('content') for x in step.messages])
  return zlib.crc32(name.encode()) % (2**31 - 1) + 1


@functools.cache
def _executor():
  return concurrent.futures.ThreadPoolExecutor(MAX_CALLS, 'text_envs')
