"""Environments of the library `verifiers` as text environments.

The library plays an episode itself: a coroutine asks OpenAI's API for each turn
and scores the whole at the end. Here a stand-in answers in place of the API. It
passes on what the model is to read, and waits for the model's next turn.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
import copy
import functools
import signal
import threading
import types
from typing import Any, NamedTuple
import weakref

import numpy as np

from rlinf_jax.agents import base, formats, replies

# One row in so many is held out if an environment has no rows for evaluation.
HELD_OUT = 8

Load = Callable[[], Any]  # Makes an environment of the library.
_lock = threading.Lock()


class VerifiersEnv:
  """Episodes of an environment of `verifiers`, of one turn or of several.

  A problem is a row of its dataset, as `draw` returns them. The reward of the
  rubric comes with the last turn.

  Attributes:
    tools: JSON schemas of the tools of the problem.
    terms: names of the rubric's functions, whose values the last turn has.
  """

  def __init__(
    self,
    load: Load,
    *,
    parse: Callable[[str], list[formats.ToolCall]] = formats.hermes,
  ):
    """Prepares an environment, which all episodes of a process share.

    Args:
      load: makes the environment, as `load_environment` of a package does. It
        is called once in a process, and its result is kept.
      parse: `text -> calls`: how the model writes tool calls, as in `formats`.
        As with servers of the API, calls that cannot be read are text.

    Raises:
      ValueError: for an environment that cannot be played row by row.
      ImportError: if verifiers is not installed.
    """
    self._shared, self._parse = _shared(load), parse
    self.terms = self._shared.terms
    self.tools: list[dict] = []
    self._end = lambda: None

  def reset(self, problem: Mapping[str, Any]) -> Sequence[base.Message]:
    self._end()
    self._model, self._read = _Model(self._parse), []
    playing = self._shared.start(
      _play(self._shared.env, dict(problem), self._model)
    )
    # An episode that is dropped ends, and cleans up.
    self._end = weakref.finalize(self, playing.cancel)
    asked = self._next()
    if not isinstance(asked, _Request):
      raise ValueError('The environment ended before the first turn.')
    self.tools = asked.tools
    return self._new_messages(asked, turns=0)

  def step(self, text: str) -> base.TimeStep:
    got = self._next(text)
    if isinstance(got, _Request):
      return base.TimeStep(self._new_messages(got, turns=1))
    return base.TimeStep(
      reward=float(got['reward']),
      terminated=not got['is_truncated'],
      truncated=bool(got['is_truncated']),
      terms={name: float(x) for name, x in got['metrics'].items()},
    )

  def _next(self, text: str | None = None) -> Any:
    """Returns the next request of the episode, or its final state."""
    got = self._shared.start(self._model.next(text)).result()
    if isinstance(got, Exception):
      raise got
    return got

  def _new_messages(self, asked: '_Request', turns: int) -> list[base.Message]:
    """Messages behind those that were read and the model's new `turns`.

    Raises:
      ValueError: if the environment changed the messages before.
    """
    n = len(self._read)
    written = asked.messages[n : n + turns]
    is_turn = [message.get('role') == 'assistant' for message in written]
    if asked.messages[:n] != self._read or is_turn != [True] * turns:
      raise ValueError(
        'The environment rewrote its conversation, and what the model has read '
        'cannot be changed: use an environment that adds messages alone.'
      )
    self._read = asked.messages
    return [_message(message) for message in asked.messages[n + turns :]]


def draw(
  rng: np.random.Generator, rows: int, held_out: bool, load: Load
) -> list[dict[str, Any]]:
  """Rows of an environment's dataset, for `problems.problems`.

  Those held out are its rows for evaluation. If it has none, they are the rows
  of every eighth prompt, which are then left out of training.

  Args:
    rng: draws the rows. To train on, rows are drawn again once all were.
    rows: their number.
    held_out: which of the two sets to draw from.
    load: as in `VerifiersEnv`.

  Raises:
    ValueError: for a dataset that has too few rows to hold so many out.
  """
  env = _shared(load).env
  if env.eval_dataset_source is not None:
    data = env.get_eval_dataset() if held_out else env.get_dataset()
    chosen = np.arange(len(data))
  else:
    data = env.get_dataset()
    chosen = np.flatnonzero(_is_held_out(load) == held_out)
  if held_out and rows > len(chosen):
    raise ValueError(
      f'{rows} problems are held out, and the environment has {len(chosen)} '
      'rows for evaluation: set problems.problems.held_out to at most as many.'
    )
  if not len(chosen):
    raise ValueError(
      f'The dataset of the environment has {len(data)} rows, too few to train '
      'on some and to evaluate on others: give it an eval_dataset.'
    )
  return [data[int(i)] for i in np.resize(rng.permutation(chosen), rows)]


@functools.cache
def _is_held_out(load: Load) -> np.ndarray:
  """Whether each row is held out: those of every eighth prompt are."""
  prompts = [str(x) for x in _shared(load).env.get_dataset()['prompt']]
  number = {x: i for i, x in enumerate(dict.fromkeys(prompts))}
  return np.array([number[x] % HELD_OUT == 0 for x in prompts])


class _Shared(NamedTuple):
  """An environment, and the event loop in which its episodes run."""

  env: Any
  loop: asyncio.AbstractEventLoop
  terms: tuple[str, ...]

  def start(self, coroutine):
    return asyncio.run_coroutine_threadsafe(coroutine, self.loop)


def _shared(load: Load) -> _Shared:
  with _lock:
    return _load(load)


@functools.cache
def _load(load: Load) -> _Shared:
  try:
    from verifiers.envs import environment
  except ImportError as error:
    raise ImportError(
      'Environments of verifiers need it: pip install "rlinf-jax[verifiers]".'
    ) from error
  # It installs handlers of SIGINT and SIGTERM, and those of this run must stay.
  environment.signal = types.SimpleNamespace(
    SIGINT=signal.SIGINT, SIGTERM=signal.SIGTERM, signal=lambda *_: None
  )
  try:
    env = load()
  finally:
    environment.signal = signal
  rubric = env.rubric
  groups = [f for f in rubric._get_reward_funcs() if rubric._is_group_func(f)]
  if env.message_type != 'chat' or groups:
    names = ', '.join(getattr(f, '__name__', repr(f)) for f in groups)
    what = f'rewards whole groups ({names})' if groups else 'has no messages'
    raise ValueError(
      f'The environment {what}, and here each row is a conversation with a '
      'reward of its own: use an environment of chats with a rubric of such '
      'rewards.'
    )
  loop = asyncio.new_event_loop()
  threading.Thread(
    target=loop.run_forever, name='verifiers', daemon=True
  ).start()
  terms = dict.fromkeys(rubric._get_reward_func_names())
  return _Shared(env, loop, tuple(terms))


class _Request(NamedTuple):
  """A request for the model's next turn."""

  messages: list[base.Message]
  tools: list[dict]


class _Model:
  """Stands in for the client of OpenAI's API, for one episode."""

  def __init__(self, parse: Callable[[str], list[formats.ToolCall]]):
    self._parse = parse
    self._turns: asyncio.Queue[str] = asyncio.Queue()
    self.got: asyncio.Queue[Any] = asyncio.Queue()
    completions = types.SimpleNamespace(create=self._create)
    self.chat = types.SimpleNamespace(completions=completions)

  async def next(self, text: str | None) -> Any:
    """Takes the model's turn, if there is one, and waits for what follows."""
    if text is not None:
      self._turns.put_nowait(text)
    return await self.got.get()

  async def _create(self, *, messages, tools=None, **settings):
    """`chat.completions.create`; the run has its own settings of sampling."""
    from openai.types import chat

    del settings
    tools = list(tools or ())
    self.got.put_nowait(_Request(copy.deepcopy(messages), tools))
    message = replies.message(await self._turns.get(), tools, self._parse)
    choice = {
      'index': 0,
      'message': message,
      'finish_reason': replies.finish_reason(message, has_ended=True),
    }
    return chat.ChatCompletion.model_validate({
      'id': 'policy',
      'object': 'chat.completion',
      'created': 0,
      'model': 'policy',
      'choices': [choice],
    })  # fmt: skip


async def _play(env, problem: dict[str, Any], model: _Model):
  """Plays an episode, whose last event is its scored state or an exception."""
  from verifiers import errors

  try:
    state = await env.rollout(problem, model, 'policy', {})
    error = state['error']
    # A turn without text ends the episode; that is no fault of the environment.
    if not isinstance(error, errors.EmptyModelResponseError | None):
      raise error
    await env.rubric.score_rollout(state)
    model.got.put_nowait(state)
  except asyncio.CancelledError:
    model.got.put_nowait(RuntimeError('The episode was dropped.'))
    raise
  except Exception as error:  # noqa: BLE001 (Foreign code: any error counts.)
    model.got.put_nowait(error)


def _message(message: Mapping[str, Any]) -> base.Message:
  """A message whose content is one text.

  Raises:
    ValueError: for pictures and sounds.
  """
  content = message.get('content') or ''
  if not isinstance(content, str):
    kinds = {part['type'] for part in content}
    if kinds != {'text'}:
      raise ValueError(
        f'A message of the environment has parts of the types '
        f'{sorted(kinds)}: use an environment whose messages are text.'
      )
    content = '\n'.join(part['text'] for part in content)
  return {**message, 'content': content}
