"""A text environment in which a model answers a question by calling tools."""

from collections.abc import Callable, Mapping, Sequence
import functools
import inspect
import math
from typing import Any

from rlinf_jax.agents import base, formats
from rlinf_jax.agents import tools as tools_lib
from rlinf_jax.data import chat
from rlinf_jax.isolation import pool
from rlinf_jax.rewards import base as rewards_base
from rlinf_jax.rewards import functions

MAX_CHARACTERS = 2000  # Of a result; what follows is cut off.
_tool = functools.cache(tools_lib.tool)  # One for all episodes.


def same_text(text: str, answer: str) -> float:
  """1 if a text is the answer, but for space around it."""
  return float(text.strip() == answer.strip())


def same_mathematics(text: str, answer: str) -> float:
  """1 if the final answer of a text is right, as `rewards.answers.correct`.

  It is found and compared in a process of its own; 0 where that fails.
  """
  completion = rewards_base.Completion(text, '', answer, tokens=0, limit=1)
  (score,) = functions.correct().score([completion])
  return 0.0 if math.isnan(score) else score


def same_react_answer(text: str, answer: str) -> float:
  """1 if the final answer of a turn in ReAct is the answer."""
  return same_text(formats.react_answer(text), answer)


class ToolEnv:
  """Runs the tools that a turn calls; a turn without calls is the answer.

  A problem is a mapping with 'question' and 'answer', and may have 'columns',
  by name. A call that cannot be read, that names no tool or that fails gives an
  error to read, so it costs its own turn.

  Attributes:
    tools: JSON schemas of the tools.
    terms: `tool_calls`, `tool_errors`, and `tool_used`, which is 1 in episodes
      with a call that succeeded.
  """

  terms = ('tool_used', 'tool_calls', 'tool_errors')

  def __init__(
    self,
    tools: Sequence[Callable | tools_lib.Tool],
    *,
    parse: Callable[[str], list[formats.ToolCall]] = formats.hermes,
    grade: Callable[..., float] = same_text,
    system_prompt: str | None = None,
    template: str = '{prompt}',
    observation: str = '',
  ):
    """Makes tools of functions.

    Args:
      tools: functions, or what `tools.tool` makes of them.
      parse: `text -> calls`: how the model writes them, as in `formats`.
      grade: `text, answer -> reward` of the last turn; of problems with
        columns, `text, answer, columns -> reward`.
      system_prompt: the system message; None for none.
      template: the user's message, in which `{prompt}` is the question.
      observation: what each result begins with, such as 'Observation: '.
    """
    chat.check_template(template)
    made = [x if isinstance(x, tools_lib.Tool) else _tool(x) for x in tools]
    self._tools = {tool.name: tool for tool in made}
    self.tools = [tool.schema for tool in made]
    self._parse, self._grade, self._system = parse, grade, system_prompt
    self._template, self._observation = template, observation

  def reset(self, problem: Mapping[str, Any]) -> list[base.Message]:
    self._right, self._used = (problem['answer'],), False
    if 'columns' in problem:
      self._right += (rewards_base.Columns(problem['columns']),)
    _check_grade(self._grade, self._right)
    system = {'role': 'system', 'content': self._system}
    content = self._template.replace('{prompt}', problem['question'])
    question = {'role': 'user', 'content': content}
    return [system, question] if self._system else [question]

  def step(self, text: str) -> base.TimeStep:
    try:
      calls = self._parse(text)
    except formats.FormatError as error:
      message = self._message('', f'error: {error}')
      return _heard([message], {'tool_errors': 1.0})
    if not calls:
      reward = float(self._grade(text, *self._right))
      return base.TimeStep(reward=reward, terminated=True)
    results = [self._call(call) for call in calls]
    errors = sum(failed for _, failed in results)
    is_first = errors < len(calls) and not self._used
    self._used |= is_first
    terms = {
      'tool_used': float(is_first),
      'tool_calls': float(len(calls)),
      'tool_errors': float(errors),
    }
    return _heard([message for message, _ in results], terms)

  def _call(self, call: formats.ToolCall) -> tuple[base.Message, bool]:
    """The message of a result or of an error, and whether it is an error."""
    if call.name not in self._tools:
      error = f'error: there is no such tool, only {", ".join(self._tools)}'
      return self._message(call.name, error), True
    try:
      content = self._tools[call.name].call(call.arguments)
    except pool.CallError as error:
      return self._message(call.name, f'error: {error}'), True
    return self._message(call.name, content), False

  def _message(self, name: str, content: str) -> base.Message:
    content = self._observation + content[:MAX_CHARACTERS]
    return {'role': 'tool', 'name': name, 'content': content}


def _check_grade(grade: Callable, right: Sequence):
  """Raises ValueError unless a grade takes what a problem has for it."""
  try:
    inspect.signature(grade).bind('', *right)
  except TypeError as error:
    given = '(text, answer, columns)' if len(right) > 1 else '(text, answer)'
    name = getattr(grade, '__name__', grade)
    raise ValueError(
      f'The grade {name}{inspect.signature(grade)} cannot be called with '
      f'{given} ({error}): write it so, or change `columns` of the questions '
      '(GRADE and COLUMNS in gin).'
    ) from error


def _heard(messages, terms) -> base.TimeStep:
  return base.TimeStep(messages=messages, terms=terms)
