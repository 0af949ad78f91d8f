"""The interface of a text environment, in plain Python."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

Message = dict[str, Any]  # As chat templates take it: 'role', 'content', ….


class TimeStep(NamedTuple):
  """The answer of an environment to a turn of the model.

  Attributes:
    messages: what the model reads next; not used where the episode ends.
    reward: reward of the turn.
    terminated: whether the episode has ended.
    truncated: whether something else ended it, such as a limit.
    terms: numbers to log, by the names in the environment's `terms`; those that
      are missing are 0. Their sums over the turns of an episode are logged.
    state: name of the state that the turn led to, for advantages by state; None
      for the contents of the messages.
  """

  messages: Sequence[Message] = ()
  reward: float = 0.0
  terminated: bool = False
  truncated: bool = False
  terms: Mapping[str, float] = {}
  state: str | None = None


class TextEnv(Protocol):
  """One episode at a time of a conversation.

  Equal problems and equal texts must give equal answers: they are how an
  episode is continued in another process. It may have these attributes:

    tools: JSON schemas of tools, which the chat template tells the model of.
    terms: names of the numbers that its time steps have.
  """

  def reset(self, problem: Any) -> Sequence[Message]:
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
