"""Batches of text environments, as the host stage of a conversation.

The environment of an episode is found by an id and by all that was said to it,
see `stepping`. So the stage is a function of its arguments, and a plan may cut,
place or repeat it. An episode is a row, or a row for each role.
"""

from collections.abc import Sequence
import concurrent.futures
import functools
import json
from typing import Any, NamedTuple
import zlib

import jax
import numpy as np

from rlinf_jax.agents import base, deadline, formats, stepping
from rlinf_jax.data import text_arrays
import stages
from stages import ranges
from stages.language import conversation, stops, tokens
from stages.language.conversation import conversation_state, take_turns

MAX_CALLS = 8  # Calls of the stage at once, such as of the pieces of a batch.


def envs(
  checkpoint: str,
  make: base.Make,
  *,
  max_answer_tokens: ranges.PositiveInt,
  chat: bool = True,
  keep_thoughts: bool = False,
  step_timeout: ranges.PositiveFloat = 60.0,
  num_threads: ranges.PositiveInt = 8,
  slots: ranges.PositiveInt | None = None,
  answer_seconds: str | None = None,
) -> conversation.TextEnvs:
  """Text environments for `conversation.converse`.

  A step that raises or is late ends its own episode, without reward and masked
  from every loss, and counts in `rollout/env_failed`.

  Args:
    checkpoint: folder of the model whose tokenizer to use.
    make: makes one environment.
    max_answer_tokens: most tokens that an environment says to a turn; an
      episode with a longer answer is truncated.
    chat: whether to render messages by the chat template, as in `formats`.
    keep_thoughts: as in `formats.answer`.
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
  env = make()
  terms, roles = base.terms(env), base.roles(env)
  if answer_seconds is not None:
    open(answer_seconds, 'a').close()  # Fails here rather than in a step.
  pool = deadline.Pool(num_threads, step_timeout)
  step = stepping.Steps(make, pool, answer_seconds)
  text = functools.partial(
    formats.reply,
    tokenizer,
    chat=chat,
    tools=base.tools(env),
    keep_thoughts=keep_thoughts,
  )
  ends = stops.stop_tokens(checkpoint)

  def write(now, i: int, answer: stepping.Answer) -> list[int]:
    # A turn that a text has ended lacks the end token of the chat template.
    end = ''
    if chat and answer.before is None and _last_token(now, i) not in ends:
      end = tokenizer.eos_token
    return _ids(tokenizer, text, max_answer_tokens, answer, end)

  def reply(answer: np.ndarray, now: conversation_state.Conversation):
    found = _waiting(len(roles), now)
    problems = text_arrays.unpack(answer[[rows[0] for rows in found.episodes]])
    turns = [
      stepping.Turn(
        now.id[rows[0]].tobytes(),
        problem,
        tuple(_texts(tokenizer, now, i) for i in rows),
      )
      for rows, problem in zip(found.episodes, problems, strict=True)
    ]
    step.drop([now.id[i].tobytes() for i in found.over])
    count = _awaited(slots, len(turns), found.ready)
    return stages.Deferred(
      _executor().submit(step, turns, count),
      functools.partial(write_reply, now, found),
    )

  def write_reply(now, found, answers) -> conversation_state.Reply:
    B = now.own.shape[0]
    of_row = functools.partial(write, now)
    out = _reply(of_row, max_answer_tokens, terms, B, found, answers)
    # Nothing asks for these again, unless another role has to be told.
    step.drop([now.id[i].tobytes() for i in _cut(now, out)])
    return out

  def out_shapes(answer, now: conversation_state.Conversation):
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
    awaited=lambda rows: _awaited(slots, rows // max(1, len(roles))),
  )
  return conversation.TextEnvs(stage, max_answer_tokens, terms, slots, roles)


class _Waiting(NamedTuple):
  """The turns that an environment stage has to answer.

  Attributes:
    episodes: the rows of each episode with a new turn, in the order of roles.
    over: a row of each episode that has ended, by a limit or otherwise.
    cut: rows that were idle when a limit of another role ended their episode.
    ready: number of rows that have the turn.
  """

  episodes: list[list[int]]
  over: list[int]
  cut: list[int]
  ready: int


def _waiting(num_roles: int, now: conversation_state.Conversation) -> _Waiting:
  """Finds the episodes in which a turn was said."""
  has_turn_B = np.asarray(conversation_state.has_turn(now.completions))
  waits_B, idle_B = np.asarray(now.waits) > 0, np.asarray(now.idle) > 0
  episodes = [[i] for i in range(len(waits_B))]
  if num_roles:
    by_id = {}
    for i, id_ in enumerate(now.id):
      by_id.setdefault(id_.tobytes(), []).append(i)
    episodes = list(by_id.values())
  found = _Waiting([], [], [], int(has_turn_B.sum()))
  for rows in episodes:
    if (waits_B & ~idle_B)[rows].any():
      found.episodes.append(rows)
    elif not has_turn_B[rows].any():
      found.over.append(rows[0])
      found.cut.extend(i for i in rows if idle_B[i])
  return found


def _awaited(slots: int | None, waiting: int, ready: int = 0) -> int:
  """Number of answers to wait for before decoding goes on.

  Args:
    slots: as in `envs`.
    waiting: episodes that wait for an answer.
    ready: rows that have the turn.
  """
  if slots is None:
    return waiting
  enough = min(slots, -(-(waiting + ready) // take_turns.SHARE))
  return min(waiting, max(0, enough - ready))


def _texts(
  tokenizer, now: conversation_state.Conversation, i: int
) -> tuple[str, ...]:
  """The policy's own turns in row `i`."""
  own_T = np.concatenate([[0], now.own[i] > 0, [0]]).astype(int)
  (start,) = np.nonzero(np.diff(own_T) > 0)
  (end,) = np.nonzero(np.diff(own_T) < 0)
  action_T = now.completions.action[i]
  rows = [action_T[a:b].tolist() for a, b in zip(start, end, strict=True)]
  # Of no rows, `batch_decode` makes one text.
  return tuple(tokenizer.decode(row, skip_special_tokens=True) for row in rows)


def _last_token(now: conversation_state.Conversation, i: int) -> int:
  """The latest token of row `i`."""
  return int(now.completions.action[i, int(now.completions.mask[i].sum()) - 1])


def _ids(
  tokenizer, text, limit: int, answer: stepping.Answer, end: str
) -> list[int]:
  """Tokens of an environment's answer; none if it has more than `limit`.

  Args:
    tokenizer: of the model.
    text: writes the messages of the environment.
    limit: most tokens.
    answer: of the environment.
    end: what the turn before it lacks.
  """
  said = end + text(answer.before, [_readable(x) for x in answer.step.messages])
  row = tokens.continue_with(tokenizer, said)
  return row if len(row) <= limit else []


def _readable(message: base.Message) -> base.Message:
  """A message whose texts have characters alone, and no halves of surrogates.

  A model may write such a half in the JSON of a call, and a tool repeat it.
  """
  return {
    k: x.encode(errors='replace').decode() if isinstance(x, str) else x
    for k, x in message.items()
  }


def _cut(
  now: conversation_state.Conversation, reply: conversation_state.Reply
) -> np.ndarray:
  """Rows that a limit ends at this reply, as `conversation_state.append` does.

  With roles, they are those that would have the next turn.
  """
  fits_B = conversation_state.fits(
    np.asarray(now.completions.mask),
    reply.mask.sum(1),
    np.asarray(now.turns) + (np.asarray(now.idle) == 0),
    now.by_turn.reward.shape[1],
  )
  goes_on_B = (reply.answered > 0) & (reply.holds == 0)
  waits_B = np.asarray(now.waits) > 0
  return np.flatnonzero(waits_B & goes_on_B & ~fits_B)


def _empty(
  B: int, E: int, terms: Sequence[str], xp: Any
) -> conversation_state.Reply:
  """A reply in which every array is zero."""
  zero_B = lambda: xp.zeros(B, xp.float32)
  return conversation_state.Reply(
    answered=zero_B(),
    holds=zero_B(),
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
  write,
  E: int,
  terms: Sequence[str],
  B: int,
  found: _Waiting,
  answers: Sequence[stepping.Answer | Exception | None],
) -> conversation_state.Reply:
  """Answers to some episodes as arrays of all rows."""
  out = _empty(B, E, terms, np)
  out.answered[found.cut] = out.truncated[found.cut] = 1.0
  for rows, answer in zip(found.episodes, answers, strict=True):
    out.answered[rows] = answer is not None
    if answer is None:
      continue
    if isinstance(answer, Exception):
      out.failed[rows] = 1.0
      continue
    step, reader = answer.step, rows[answer.reader]
    out.reward[rows] = answer.rewards
    out.terminated[rows] = step.terminated
    out.truncated[rows] = step.truncated
    for name in terms:
      out.terms[name][rows[answer.speaker]] = step.terms.get(name, 0.0)
    if not answer.is_last:
      ids = write(reader, answer)
      out.holds[[i for i in rows if i != reader]] = 1.0
      out.state[reader] = _state_number(step)
      out.token[reader, : len(ids)] = ids
      out.mask[reader, : len(ids)] = 1
  return out


def _state_number(step: base.TimeStep) -> int:
  """A number of 31 bits, which is never 0 as that of the prompt is."""
  name = step.state
  if name is None:
    name = json.dumps([x.get('content') for x in step.messages])
  return zlib.crc32(name.encode(errors='replace')) % (2**31 - 1) + 1


@functools.cache
def _executor():
  return concurrent.futures.ThreadPoolExecutor(MAX_CALLS, 'text_envs')
