"""Sessions: what was served to an agent, as token ids, for training.

A call whose messages begin with an earlier conversation of its session, the
model's reply included, continues the ids of that conversation: what the model
wrote is never tokenized again, and only the messages behind it are. Any other
call, such as after an agent has edited its history, starts a new trajectory.
"""

import collections
from collections.abc import Callable, Mapping, Sequence
import dataclasses
import hashlib
import json
import secrets
import threading
from typing import Any, NamedTuple

from rlinf_jax.agents import formats
from stages.language import tokens

MAX_SESSIONS = 10_000  # Of those that clients create; the oldest are dropped.
MAX_CALLS = 1000  # Of one session.


class Trajectory(NamedTuple):
  """Ids of one conversation, up to and with the model's last reply.

  Attributes:
    prompt: ids that the model read before its first turn.
    ids: ids after them, of the model and of what it was answered.
    own: 1 on the model's own ids, 0 on others.
    logp: log-probability of each id when it was sampled; 0 where `own` is 0.
    version: version of the parameters that sampled it, likewise.
    truncated: whether a limit of tokens cut the last reply.
  """

  prompt: tuple[int, ...]
  ids: tuple[int, ...] = ()
  own: tuple[int, ...] = ()
  logp: tuple[float, ...] = ()
  version: tuple[int, ...] = ()
  truncated: bool = False

  def read(self, ids: Sequence[int]) -> 'Trajectory':
    """The trajectory after ids that the model did not write."""
    n = len(ids)
    return self._replace(
      ids=(*self.ids, *ids),
      own=self.own + (0,) * n,
      logp=self.logp + (0.0,) * n,
      version=self.version + (0,) * n,
    )

  def wrote(
    self, ids: Sequence[int], logp: Sequence[float], version: int, cut: bool
  ) -> 'Trajectory':
    """The trajectory after a turn of the model."""
    n = len(ids)
    return Trajectory(
      self.prompt,
      (*self.ids, *ids),
      self.own + (1,) * n,
      (*self.logp, *logp),
      self.version + (version,) * n,
      cut,
    )


@dataclasses.dataclass
class _Reply:
  """A reply that later calls may continue.

  A session of many calls would fill the memory if each kept the conversation.

  Attributes:
    num_messages: of the conversation up to this reply, its tools among them.
    digest: of these messages.
    num_ids: of the trajectory, behind its prompt.
    truncated: whether a limit of tokens cut the reply.
    whole: the trajectory; of a reply that was continued, the first reply that
      did, whose trajectory begins with this one.
  """

  num_messages: int
  digest: bytes
  num_ids: int
  truncated: bool
  whole: 'Trajectory | _Reply'

  @property
  def is_continued(self) -> bool:
    return isinstance(self.whole, _Reply)

  def trajectory(self) -> Trajectory:
    """The ids up to and with this reply."""
    whole, n = self.whole, self.num_ids
    while isinstance(whole, _Reply):
      whole = whole.whole
    return Trajectory(
      whole.prompt,
      whole.ids[:n],
      whole.own[:n],
      whole.logp[:n],
      whole.version[:n],
      self.truncated,
    )


class Start(NamedTuple):
  """Input of a call.

  Attributes:
    trajectory: the ids so far.
    parent: the reply that it continues; None for a new trajectory.
  """

  trajectory: Trajectory
  parent: _Reply | None

  @property
  def ids(self) -> tuple[int, ...]:
    return self.trajectory.prompt + self.trajectory.ids


class Session:
  """The calls of one agent on one problem.

  Attributes:
    id: its name.
    token: an API key that admits to this session alone.
    reward: what the agent was worth; None until it is given.
    key: of its samples; None for random ones.
    temperature: of its samples, which overrules that of calls; None for
      theirs.
  """

  def __init__(self, key: Any = None, temperature: float | None = None):
    self.id = secrets.token_urlsafe(16)
    self.token = secrets.token_urlsafe(32)
    self.reward: float | None = None
    self.key, self.temperature, self._calls = key, temperature, 0
    self._cancels: set[Callable] | None = set()  # None once it is closed.
    self._replies: list[_Reply] = []
    self._lock = threading.Lock()

  def on_close(self, cancel: Callable[[], None]):
    """Calls `cancel` when the session closes, or now if it has."""
    with self._lock:
      if self._cancels is not None:
        self._cancels.add(cancel)
        return
    cancel()

  def forget(self, cancel: Callable[[], None]):
    """Keeps a `cancel` of `on_close` no longer."""
    with self._lock:
      if self._cancels is not None:
        self._cancels.discard(cancel)

  def close(self):
    """Cancels calls under way; nothing more is recorded."""
    with self._lock:
      cancels, self._cancels = self._cancels or (), None
    for cancel in cancels:
      cancel()

  def next_call(self) -> int:
    """The number of a new call.

    Raises:
      ValueError: after too many.
    """
    with self._lock:
      if self._calls >= MAX_CALLS:
        raise ValueError(
          f'The session has had {MAX_CALLS} calls: create another one.'
        )
      self._calls += 1
      return self._calls - 1

  def start(self, tokenizer, messages, tools: Sequence[dict]) -> Start:
    """The ids that a call reads."""
    digests = _digests(messages, tools)
    with self._lock:
      found = [
        reply
        for reply in sorted(self._replies, key=lambda x: -x.num_messages)
        if reply.digest in digests[reply.num_messages - 1 : -1][:1]
      ]
    for reply in found:
      with self._lock:
        trajectory = reply.trajectory()
      said = _said(tokenizer, trajectory, messages[reply.num_messages - 1 :])
      if said is not None:
        return Start(trajectory.read(said), reply)
    return start(tokenizer, messages, tools)

  def record(
    self,
    begun: Start,
    messages: Sequence[Mapping],
    tools: Sequence[dict],
    reply: Mapping,
    trajectory: Trajectory,
  ):
    """Adds a reply that was served whole."""
    digests = _digests([*messages, reply], tools)
    x = trajectory
    made = _Reply(len(digests), digests[-1], len(x.ids), x.truncated, x)
    with self._lock:
      if self._cancels is None:
        return
      if begun.parent is not None and not begun.parent.is_continued:
        begun.parent.whole = made
      self._replies.append(made)

  def trajectories(self) -> list[Trajectory]:
    """Conversations that no later call continues, the oldest first."""
    with self._lock:
      return [x.trajectory() for x in self._replies if not x.is_continued]


def start(tokenizer, messages, tools: Sequence[dict]) -> Start:
  """The ids of a conversation that is new.

  Raises:
    ValueError: if the chat template refuses the messages.
  """
  text = formats.prompt(
    tokenizer, [_for_template(m) for m in messages], chat=True, tools=tools
  )
  ids = tokenizer(text, add_special_tokens=False)['input_ids']
  return Start(Trajectory(tuple(ids)), None)


def _said(tokenizer, before: Trajectory, messages) -> list[int] | None:
  """Ids of messages behind a reply; None if only a new trajectory can tell."""
  if any(m['role'] == 'assistant' for m in messages):
    return None  # Words that the model did not write here.
  # Without a thought there is none that the chat template could drop.
  thinks = '</think>' in tokenizer.decode(before.ids)
  try:
    text = formats.answer(
      tokenizer,
      [_for_template(m) for m in messages],
      chat=True,
      keep_thoughts=not thinks,
    )
  except ValueError:  # Such as of templates that want a call before a result.
    return None
  ended = before.ids[-1:] == (tokenizer.eos_token_id,)
  end = [] if ended else [tokenizer.eos_token_id]
  return end + tokens.continue_with(tokenizer, text)


def _digests(messages: Sequence[Mapping], tools: Sequence[dict]) -> list[bytes]:
  """A digest of the tools, and of them with 1, 2, ... of the messages."""
  digest, found = hashlib.sha256(), []
  for text in (_canonical(list(tools)), *map(canonical, messages)):
    digest.update(hashlib.sha256(text.encode()).digest())
    found.append(digest.digest())
  return found


def canonical(message: Mapping) -> str:
  """Text that is equal for equal messages, without what clients add to them."""
  calls = [
    (call['function']['name'], _arguments(call))
    for call in message.get('tool_calls') or ()
  ]
  content = message.get('content') or ''
  if message['role'] == 'assistant':
    content = content.strip()  # Many frameworks strip it.
  return _canonical([message['role'], content, calls])


def _canonical(x: Any) -> str:
  return json.dumps(x, sort_keys=True)


def _arguments(call: Mapping) -> Any:
  try:
    return json.loads(call['function']['arguments'])
  except (ValueError, RecursionError):
    return call['function']['arguments']


def _for_template(message: Mapping) -> dict:
  """A message as chat templates take it: arguments are mappings there."""
  message = {k: v for k, v in message.items() if v is not None}
  message.setdefault('content', '')
  if message.get('tool_calls'):
    message['tool_calls'] = [
      {
        **call,
        'function': {**call['function'], 'arguments': _arguments(call)},
      }
      for call in message['tool_calls']
    ]
  return message


class Sessions:
  """All sessions of a server."""

  def __init__(self):
    self._by_id: dict[str, Session] = {}
    self._by_token: dict[str, Session] = {}
    # Sessions that may be dropped, the oldest first.
    self._old: collections.OrderedDict[str, Session] = collections.OrderedDict()
    self._lock = threading.Lock()

  def create(
    self,
    key: Any = None,
    temperature: float | None = None,
    may_be_dropped: bool = True,
  ) -> Session:
    """Makes a session.

    Args:
      key: of its samples; None for random ones.
      temperature: of its samples; None for that of its calls.
      may_be_dropped: whether it is dropped once there are `MAX_SESSIONS` newer
        ones. Otherwise, it lasts until it is removed.
    """
    session = Session(key, temperature)
    with self._lock:
      self._by_id[session.id] = session
      self._by_token[session.token] = session
      if may_be_dropped:
        self._old[session.id] = session
      if len(self._old) > MAX_SESSIONS:
        self._forget(next(iter(self._old.values())))
    return session

  def remove(self, session: Session):
    """Closes and forgets a session; its token admits to nothing."""
    session.close()
    with self._lock:
      self._forget(session)

  def _forget(self, session: Session):
    self._by_id.pop(session.id, None)
    self._by_token.pop(session.token, None)
    self._old.pop(session.id, None)

  def find(self, name: str) -> Session | None:
    return self._by_id.get(name)

  def of_token(self, token: str) -> Session | None:
    # A token has 256 random bits: how long a look-up takes tells nothing.
    return self._by_token.get(token)
