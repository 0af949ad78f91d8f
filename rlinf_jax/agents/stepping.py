"""Steps of text environments, whose episodes are found by what was said.

The environment of an episode is kept between its turns. Where it is not found,
as after a restart or in another process, a new one is given the texts of the
episode once more.
"""

import collections
from collections.abc import Sequence
import json
import threading
from typing import NamedTuple

from rlinf_jax.agents import base, deadline
from rlinf_jax.system import notices

MAX_LIVE = 2**16  # Environments that are kept; the oldest are made anew.


class Turn(NamedTuple):
  """A turn that an environment answers.

  Attributes:
    id: of its episode.
    problem: JSON of the problem.
    texts: all turns of the episode so far, by role; one of them is new.
  """

  id: bytes
  problem: str
  texts: tuple[tuple[str, ...], ...]


class Answer(NamedTuple):
  """The answer to a turn, by the numbers of roles.

  Attributes:
    step: of the environment.
    speaker: the role that had the turn.
    reader: the role that reads the messages and has the next turn.
    rewards: the reward of each role.
    before: messages of the reader's prompt, if it has its first turn next; None
      if it has had one.
  """

  step: base.TimeStep
  speaker: int
  reader: int
  rewards: tuple[float, ...]
  before: Sequence[base.Message] | None

  @property
  def is_last(self) -> bool:
    """Whether the episode has ended."""
    return self.step.terminated or self.step.truncated


class Episode(NamedTuple):
  """An environment, what was said to it, and who has the turn.

  Attributes:
    env: the environment.
    problem: JSON of the problem.
    texts: what it was told, by role.
    speaker: the role that has the turn.
    prompts: messages of the prompts, by role.
  """

  env: base.TextEnv
  problem: str
  texts: tuple[tuple[str, ...], ...]
  speaker: int
  prompts: tuple[Sequence[base.Message], ...]

  def next_text(self, texts: tuple[tuple[str, ...], ...]) -> str | None:
    """The speaker's next text in `texts`; None if it is not there yet."""
    said = texts[self.speaker]
    heard = len(self.texts[self.speaker])
    return said[heard] if heard < len(said) else None

  def precedes(self, texts: tuple[tuple[str, ...], ...]) -> bool:
    """Whether `texts` begin with what the environment was told, and go on."""
    pairs = zip(self.texts, texts, strict=True)
    return self.texts != texts and all(a == b[: len(a)] for a, b in pairs)

  def step(self, text: str) -> tuple[Answer, 'Episode']:
    """Tells the environment a turn of the speaker."""
    roles, i = base.roles(self.env), self.speaker
    step = self.env.step(text)
    # Here, what no chat template can write fails its own episode.
    base.check_messages(self.env, 'step', step.messages)
    # Likewise, what is no number.
    terms = {name: float(x) for name, x in step.terms.items()}
    step = step._replace(terms=terms)
    texts = (*self.texts[:i], (*self.texts[i], text), *self.texts[i + 1 :])
    reader = i if step.role is None else base.role_number(roles, step.role)
    answer = Answer(
      step,
      i,
      reader,
      base.rewards(roles, step.reward, i),
      None if texts[reader] else self.prompts[reader],
    )
    return answer, self._replace(texts=texts, speaker=reader)


def begin(env: base.TextEnv, problem: str) -> Episode:
  """The episode of a problem, in which nothing has been said.

  Args:
    env: an environment, which is reset.
    problem: JSON of the problem.
  """
  prompts = base.prompts(env, json.loads(problem))
  return Episode(env, problem, ((),) * len(prompts), 0, prompts)


class _Stepped(NamedTuple):
  """An answer, and the episode after it."""

  answer: Answer
  episode: Episode


class Steps:
  """Steps environments, and keeps those whose episodes go on."""

  def __init__(
    self, make: base.Make, pool: deadline.Pool, record: str | None = None
  ):
    """Makes no environment yet.

    Args:
      make: makes one environment.
      pool: threads that step them.
      record: file to which seconds of steps are appended; None for none.
    """
    self._make, self._pool, self._record = make, pool, record
    self._live: collections.OrderedDict[bytes, Episode] = (
      collections.OrderedDict()
    )
    self._calls: collections.OrderedDict[Turn, deadline.Call] = (
      collections.OrderedDict()
    )
    self._lock, self._failed = threading.Lock(), False

  def __call__(
    self, turns: Sequence[Turn], count: int
  ) -> list[Answer | Exception | None]:
    """Answers to turns; None where there is none yet, of all but `count`.

    An exception stands for a step that failed. A turn without an answer is
    asked for again, and its step goes on meanwhile.
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
    answers = [x.answer if isinstance(x, _Stepped) else x for x in results]
    self._report(answers)
    return answers

  def drop(self, ids: Sequence[bytes]):
    """Forgets episodes that have ended without their environments' doing.

    Their steps that are under way go on, and nothing keeps their answers.
    """
    dropped = {*ids}
    with self._lock:
      for id_ in dropped:
        self._live.pop(id_, None)
      for turn in [turn for turn in self._calls if turn.id in dropped]:
        del self._calls[turn]

  def _keep(self, id_: bytes, result: _Stepped):
    """Keeps an episode for its next turn, if there may be one."""
    if result.answer.is_last:
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

  def _report(self, answers: Sequence[Answer | Exception | None]):
    """Prints the first failure of the run."""
    for answer in answers:
      if isinstance(answer, Exception) and not self._failed:
        self._failed = True
        notices.notify(
          'A text environment failed, which ends its episode without reward '
          f'({type(answer).__name__}: {answer}). Others that fail are only '
          'counted.'
        )

  def _step(self, turn: Turn) -> _Stepped:
    """Tells an environment what it has not been told; in a thread."""
    with self._lock:
      live = self._live.pop(turn.id, None)
    if (
      live is None
      or live.problem != turn.problem
      or not live.precedes(turn.texts)
    ):
      live = begin(self._make(), turn.problem)
    answer = None
    while (text := live.next_text(turn.texts)) is not None:
      answer, live = live.step(text)
    if answer is None or live.texts != turn.texts:
      raise ValueError(
        'The roles of an episode have said more than their turns: equal '
        'problems and texts must give equal answers'
      )
    return _Stepped(answer, live)
