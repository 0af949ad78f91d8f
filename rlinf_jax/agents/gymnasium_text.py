"""Environments of Gymnasium as text environments."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any
import weakref

from rlinf_jax.agents import base


class GymnasiumText:
  """An environment of Gymnasium whose observations and actions are texts.

  A problem is a mapping, all of whose entries may be left out: 'seed' (0) and
  'options' of its reset, and 'make', arguments of `gymnasium.make` for this
  problem alone. A turn is one action. A turn that is none changes nothing, and
  the model reads which actions there are.

  Attributes:
    terms: `invalid_actions`.
  """

  terms = ('invalid_actions',)

  def __init__(
    self,
    task: str,
    *,
    actions: Sequence[str] | None = None,
    describe: Callable[[Any], str] = str,
    system_prompt: str | None = None,
    make: Mapping[str, Any] | None = None,
  ):
    """Prepares an environment, which a reset makes.

    Args:
      task: its id, such as 'FrozenLake-v1'.
      actions: words for the actions of a Discrete space, by number; None for
        '0', '1', …. A Text space takes a turn as it is.
      describe: `observation -> text`. Where `make` has `render_mode='ansi'`, it
        describes what `render` returns instead.
      system_prompt: the system message; None for none.
      make: arguments of `gymnasium.make`.
    """
    self._task, self._words, self._describe = task, actions, describe
    self._system, self._make = system_prompt, dict(make or {})
    self._close = lambda: None

  def reset(self, problem: Mapping[str, Any]) -> list[base.Message]:
    import gymnasium

    self._close()
    kwargs = self._make | problem.get('make', {})
    self._env = gymnasium.make(self._task, **kwargs)
    # An episode that is dropped closes its windows, files and processes.
    self._close = weakref.finalize(self, self._env.close)
    self._actions = _actions(self._task, self._env.action_space, self._words)
    observation, _ = self._env.reset(
      seed=problem.get('seed', 0), options=problem.get('options')
    )
    system = {'role': 'system', 'content': self._system}
    first = {'role': 'user', 'content': self._text(observation)}
    return [system, first] if self._system else [first]

  def step(self, text: str) -> base.TimeStep:
    action = text
    if self._actions is not None:
      action = self._actions.get(text.strip().lower())
    elif not self._env.action_space.contains(text):
      action = None
    if action is None:
      allowed = 'another text'
      if self._actions is not None:
        allowed = f'one of {", ".join(self._actions)}'
      message = f'error: this is no action, write {allowed}'
      return base.TimeStep(_user(message), terms={'invalid_actions': 1.0})
    observation, reward, terminated, truncated, _ = self._env.step(action)
    over = bool(terminated), bool(truncated)
    return base.TimeStep(_user(self._text(observation)), float(reward), *over)

  def _text(self, observation) -> str:
    if self._env.render_mode == 'ansi':
      observation = self._env.render()
    return self._describe(observation)


def _user(text: str) -> list[base.Message]:
  return [{'role': 'user', 'content': text}]


def _actions(
  task: str, space, words: Sequence[str] | None
) -> dict[str, int] | None:
  """Actions by word; None where a text is the action.

  Raises:
    ValueError: for other spaces, or another number of words.
  """
  import gymnasium

  if isinstance(space, gymnasium.spaces.Text) and words is None:
    return None
  if not isinstance(space, gymnasium.spaces.Discrete):
    raise ValueError(
      f'{task} has actions of {space}, which no words name: use an '
      'environment with a Discrete space, or with a Text space and no actions.'
    )
  if words is None:
    words = [str(i) for i in range(space.n)]
  if len({word.strip().lower() for word in words}) != space.n:
    raise ValueError(
      f'{task} has {space.n} actions and was given the words {list(words)}: '
      f'give {space.n} different ones, in the order of their numbers.'
    )
  start = int(space.start)
  return {word.strip().lower(): start + i for i, word in enumerate(words)}
