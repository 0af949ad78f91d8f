"""The interface of a text environment, in plain Python."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

Message = dict[str, Any]  # As chat templates take it: 'role', 'content', ….


class TimeStep(NamedTuple):
  """The answer of an environment to a turn of the model.

  Attributes:
    messages: what the model reads next; not used where the episode ends.
    reward: reward of the turn; with roles, that of the role that had it, or
      rewards by the names of roles, each for the last turn of its role.
    terminated: whether the episode has ended.
    truncated: whether something else ended it, such as a limit.
    terms: numbers to log, by the names in the environment's `terms`; those that
      are missing are 0. Their sums over the turns of an episode are logged.
    state: name of the state that the turn led to, for advantages by state; None
      for the contents of the messages.
    role: the role that reads the messages and has the next turn; None for the
      one that had this turn.
  """

  messages: Sequence[Message] = ()
  reward: float | Mapping[str, float] = 0.0
  terminated: bool = False
  truncated: bool = False
  terms: Mapping[str, float] = {}
  state: str | None = None
  role: str | None = None


class TextEnv(Protocol):
  """One episode at a time of a conversation.

  Equal problems and equal texts must give equal answers: they are how an
  episode is continued in another process. It may have these attributes:

    tools: JSON schemas of tools, which the chat template tells the model of.
    terms: names of the numbers that its time steps have.
    roles: names of several roles that the model plays, of which the first has
      the first turn; `reset` then returns messages by their names.
  """

  def reset(
    self, problem: Any
  ) -> Sequence[Message] | Mapping[str, Sequence[Message]]:
    """Starts the episode of a problem; returns the messages of the prompt."""

  def step(self, text: str) -> TimeStep:
    """Answers a turn of the model, without its end token."""


Make = Callable[[], TextEnv]  # Makes an environment without an episode.


def terms(env: TextEnv) -> tuple[str, ...]:
  """Names of the numbers that an environment logs."""
  return tuple(getattr(env, 'terms', ()))


def tools(env: TextEnv) -> list[dict]:
  """JSON schemas of the tools of an environment."""
  return list(getattr(env, 'tools', ()))


def roles(env: TextEnv) -> tuple[str, ...]:
  """Names of the roles of an environment; () if it has one without a name.

  Raises:
    ValueError: if a name occurs twice, or is one of the numbers it logs.
  """
  names = tuple(getattr(env, 'roles', ()))
  logged = [*terms(env), 'turns']
  logged += [f'{name}_turns' for name in names]
  twice = {x for x in names if names.count(x) > 1 or x in logged}
  if twice:
    raise ValueError(
      f'{type(env).__name__} has the roles {[*names]}, of which '
      f'{sorted(twice)} are named twice, or are names of other numbers that '
      'are logged: give each role a name of its own.'
    )
  return names


def prompts(env: TextEnv, problem: Any) -> tuple[Sequence[Message], ...]:
  """Starts an episode; returns the messages of each role's prompt.

  Raises:
    ValueError: if the environment does not return messages for its roles.
  """
  names, messages = roles(env), env.reset(problem)
  if not names:
    check_messages(env, 'reset', messages)
    return (messages,)
  if not isinstance(messages, Mapping) or set(messages) != set(names):
    raise ValueError(
      f'{type(env).__name__}.reset returned no mapping from its roles '
      f'{[*names]} to the messages of their prompts: return one.'
    )
  for name in names:
    check_messages(env, 'reset', messages[name])
  return tuple(messages[name] for name in names)


def check_messages(env: TextEnv, method: str, messages: Sequence[Message]):
  """Checks that each message of an environment has a role and a content.

  Args:
    env: the environment.
    method: the name of its method that returned them.
    messages: what it returned.

  Raises:
    ValueError: names the environment and the message.
  """
  for message in messages:
    # A message that calls tools may have no content, by OpenAI's format.
    has_content = isinstance(message, Mapping) and (
      _is_text(message.get('content'))
      or (message.get('content') is None and bool(message.get('tool_calls')))
    )
    if not has_content or not isinstance(message.get('role'), str):
      raise ValueError(
        f'{type(env).__name__}.{method} returned the message '
        f'{repr(message):.200}, which lacks a role or a content: return '
        "{'role': …, 'content': …} with texts, such as an empty one, or with a "
        "list of parts {'type': 'text', 'text': …}."
      )


def _is_text(content: Any) -> bool:
  """Whether the content of a message is a text, or a list of such parts."""
  if isinstance(content, str):
    return True
  return isinstance(content, Sequence) and all(
    isinstance(part, Mapping)
    and part.get('type') == 'text'
    and isinstance(part.get('text'), str)
    for part in content
  )


def role_number(names: Sequence[str], name: str) -> int:
  """The number of a role.

  Raises:
    ValueError: if there is no such role.
  """
  if name not in names:
    raise ValueError(
      f'A step names the role {name!r}, and the environment has {[*names]}: '
      'name one of them.'
    )
  return names.index(name)


def is_finite(reward: float) -> bool:
  """Whether a reward is a number in the range of float32, as arrays have it."""
  return abs(reward) <= (2 - 2**-23) * 2.0**127


def rewards(
  names: Sequence[str], reward: float | Mapping[str, float], speaker: int
) -> tuple[float, ...]:
  """The reward of each role in a step.

  Args:
    names: of the roles; () for one role without a name.
    reward: as in `TimeStep`.
    speaker: number of the role that had the turn.

  Raises:
    ValueError: if a reward is for a role that there is not, or is not finite.
  """
  if isinstance(reward, Mapping):
    given = {role_number(names, k): float(x) for k, x in reward.items()}
  else:
    given = {speaker: float(reward)}
  for x in given.values():
    if not is_finite(x):
      raise ValueError(f'its reward is {x}')
  return tuple(given.get(i, 0.0) for i in range(max(1, len(names))))
