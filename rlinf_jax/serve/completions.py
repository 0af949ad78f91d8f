"""Chat completions: from a checked request to recorded replies."""

import asyncio
import bisect
from collections.abc import Callable, Sequence
import secrets
import time
from typing import Any, NamedTuple

import jax

from rlinf_jax.agents import formats, replies
from rlinf_jax.serve import batches, engine_decoder, requests, sessions
from stages.language import sample


class Served(NamedTuple):
  """The model that a server serves.

  Attributes:
    name: of the model, as clients say it.
    tokenizer: of the model.
    decoder: of the model.
    parse: `text -> calls`: how the model writes calls, as in `formats`.
  """

  name: str
  tokenizer: Any
  decoder: batches.Decoder | engine_decoder.Decoder
  parse: Callable[[str], list] = formats.hermes


class _Choice:
  """One reply under way: what the decoding thread tells the event loop."""

  def __init__(self, chat: 'Completion', limit: int, key):
    self._chat, self._loop = chat, asyncio.get_running_loop()
    self.news, self.ended = asyncio.Event(), self._loop.create_future()
    self.ids: list[int] = []
    self.logp: list[float] = []
    self.text, self.is_stopped = '', False
    self.job = batches.Job(
      chat.begun.ids, limit, key, chat.temperature, self._heard, self._ended
    )

  def _heard(self, ids: list[int], logp: list[float]) -> bool:
    chat = self._chat
    found = replies.text(chat.served.tokenizer, ids, chat.request.stop)
    if found.is_stopped:
      # Not the tokens that were sampled behind the stop text.
      n = _shortest(chat.served.tokenizer, ids, chat.request.stop)
      ids, logp = ids[:n], logp[:n]
    self._tell(self._put, ids, logp, found)
    return not found.is_stopped

  def _put(self, ids, logp, found: replies.Text):
    self.ids, self.logp = ids, logp
    self.text, self.is_stopped = found
    self.news.set()

  def _ended(self, result: int | Exception):
    self._tell(self._end, result)

  def _end(self, result: int | Exception):
    if not self.ended.done():
      self.ended.set_result(result)
    self.news.set()
    self._chat.forget_if_ended()

  def _tell(self, function, *args):
    try:
      self._loop.call_soon_threadsafe(function, *args)
    except RuntimeError:  # The server has stopped.
      self.job.is_cancelled.set()


def _shortest(tokenizer, ids: Sequence[int], stop: Sequence[str]) -> int:
  """The fewest of the first ids whose text has a stop text, as all ids have."""
  return 1 + bisect.bisect_left(
    range(1, len(ids)),
    True,
    key=lambda n: replies.text(tokenizer, ids[:n], stop).is_stopped,
  )


class Completion:
  """One request for chat completions."""

  def __init__(
    self,
    served: Served,
    request: requests.ChatRequest,
    session: sessions.Session | None,
  ):
    """Reads the prompt and lets its choices wait for the decoder.

    Raises:
      RequestError: if the prompt is refused or too many requests wait.
    """
    self.served, self.request, self.session = served, request, session
    self.id = f'chatcmpl-{secrets.token_hex(12)}'
    self.created = int(time.time())
    self.temperature = request.temperature
    if session is not None and session.temperature is not None:
      self.temperature = session.temperature
    self.begun = self._start()
    limit = self._limit()
    key = self._key()
    self._choices = [
      _Choice(self, limit, jax.random.fold_in(key, i)) for i in range(request.n)
    ]
    if session is not None:
      session.on_close(self.cancel)
    try:
      for choice in self._choices:
        served.decoder.submit(choice.job)
    except batches.BusyError as error:
      self.cancel()
      if session is not None:
        session.forget(self.cancel)
      raise requests.RequestError(str(error), 429, code='busy') from None

  def _start(self) -> sessions.Start:
    begin = self.session.start if self.session else sessions.start
    x = self.request
    try:
      return begin(self.served.tokenizer, x.messages, x.tools)
    except Exception as error:
      raise requests.RequestError(
        f'The chat template refuses the messages ({str(error)[:300]}).',
        param='messages',
      ) from error

  def _limit(self) -> int:
    decoder, n = self.served.decoder, len(self.begun.ids)
    if not 0 < n <= decoder.prompt_length:
      raise requests.RequestError(
        f'The messages have {n} tokens and the limit is '
        f'{decoder.prompt_length}: shorten them.',
        param='messages',
        code='context_length_exceeded',
      )
    limit = self.request.limit or decoder.response_length
    if limit > decoder.response_length:
      raise requests.RequestError(
        f"'max_tokens' is {limit} and a reply has at most "
        f'{decoder.response_length} tokens here: ask for fewer, or raise the '
        'limit (--response_length of a server, call_length of agents).',
        param='max_tokens',
      )
    return limit

  def _key(self):
    if self.session is not None:
      try:
        call = self.session.next_call()
      except ValueError as error:
        raise requests.RequestError(str(error), 429) from None
      if self.session.key is not None:
        return jax.random.fold_in(self.session.key, call)
    seed = self.request.seed
    seed = secrets.randbits(63) if seed is None else seed % 2**63
    return sample.key(seed)

  def cancel(self):
    """Ends the decoding; nothing more is recorded."""
    for choice in self._choices:
      choice.job.is_cancelled.set()

  def forget_if_ended(self):
    """Lets the session keep nothing of a call whose choices have ended."""
    if self.session is not None and all(x.ended.done() for x in self._choices):
      self.session.forget(self.cancel)

  async def whole(self) -> dict:
    """The completion, once all choices have ended."""
    choices = [
      await self._finish(i, choice) for i, choice in enumerate(self._choices)
    ]
    return {**self._head('chat.completion'), 'choices': choices} | {
      'usage': self._usage()
    }

  async def events(self):
    """Yields the completion as server-sent events.

    With tools, the text of a reply comes at once, as it may become calls.
    """
    try:
      for i, choice in enumerate(self._choices):
        async for part in self._parts(i, choice):
          yield replies.event(
            {**self._head('chat.completion.chunk'), 'choices': [part]}
          )
      if self.request.usage:
        head = self._head('chat.completion.chunk')
        yield replies.event({**head, 'choices': [], 'usage': self._usage()})
      yield replies.event('[DONE]')
    except requests.RequestError as error:
      yield replies.event(error.body)
    finally:
      self.cancel()  # The client may have left before the end.

  async def _parts(self, i: int, choice: _Choice):
    """Yields what a stream says of one choice."""
    sent, told = '', 0
    yield _part(i, {'role': 'assistant', 'content': ''})
    while not choice.ended.done():
      await choice.news.wait()
      choice.news.clear()
      if choice.ended.done() or self.request.tools:
        continue
      text = choice.text
      if not choice.is_stopped:
        text = replies.settled(text, self.request.stop)
      if len(text) > len(sent):
        yield _part(
          i, {'content': text[len(sent) :]}, self._logprobs(choice, told)
        )
        sent, told = text, len(choice.ids)
    end = await self._finish(i, choice)
    message = end['message']
    rest = {'content': (message['content'] or '')[len(sent) :]}
    rest |= replies.delta(message)
    yield _part(i, rest, self._logprobs(choice, told))
    yield _part(i, {}, reason=end['finish_reason'])

  async def _finish(self, i: int, choice: _Choice) -> dict:
    """Waits for a choice, and records it."""
    result = await choice.ended
    if isinstance(result, Exception):
      raise requests.RequestError(
        'The server failed; its log says why.', 500, code='server_error'
      )
    if choice.job.is_cancelled.is_set():
      raise requests.RequestError('The session has ended.', 410)
    x = self.request
    message = replies.message(choice.text, x.tools, self.served.parse)
    ended = choice.is_stopped or (
      choice.ids[-1:] != [] and choice.ids[-1] in self.served.decoder.stop
    )
    if self.session is not None:
      self.session.record(
        self.begun,
        x.messages,
        x.tools,
        message,
        self.begun.trajectory.wrote(choice.ids, choice.logp, result, not ended),
      )
    return {
      'index': i,
      'message': {'refusal': None, **message},
      'logprobs': self._logprobs(choice, 0),
      'finish_reason': replies.finish_reason(message, ended),
    }

  def _logprobs(self, choice: _Choice, start: int) -> dict | None:
    if not self.request.logprobs:
      return None
    return replies.logprobs(
      self.served.tokenizer, choice.ids, choice.logp, start
    )

  def _usage(self) -> dict:
    completion = sum(len(choice.ids) for choice in self._choices)
    return replies.usage(len(self.begun.ids), completion)

  def _head(self, kind: str) -> dict:
    return {
      'id': self.id,
      'object': kind,
      'created': self.created,
      'model': self.served.name,
    }


def _part(i: int, delta: dict, logprobs=None, reason: str | None = None):
  return {
    'index': i,
    'delta': delta,
    'logprobs': logprobs,
    'finish_reason': reason,
  }
