"""Text of conversations: what a model reads, and the tool calls it writes."""

import ast
from collections.abc import Mapping, Sequence
import functools
import json
import re
from typing import Any, NamedTuple

from rlinf_jax.agents import base
from rlinf_jax.data import chat_template

# They stand for a turn of the model, and for a thought in it, where a chat
# template is rendered.
TURN = 'rlinf-jax-turn'
THOUGHT = 'rlinf-jax-thought'
REACT_ACTION = re.compile(r'^[ \t]*Action(?: \d+)?:', re.M)
REACT_INPUT = re.compile(r'^[ \t]*Action Input(?: \d+)?:', re.M)
# A line that ends an action, if the model goes on.
REACT_NEXT = re.compile(
  r'^[ \t]*(?:Thought|Observation|Final Answer)(?: \d+)?:', re.M
)
HERMES_CALL = re.compile(r'<tool_call>(.*?)(?:</tool_call>|$)', re.S)


class FormatError(ValueError):
  """A text has tool calls that cannot be read; the message says why."""


class ToolCall(NamedTuple):
  """A call of a tool.

  Attributes:
    name: of the tool.
    arguments: by name; a text where the tool has one argument, whose name the
      model does not give.
  """

  name: str
  arguments: Mapping[str, Any] | str


def pythonic(text: str) -> list[ToolCall]:
  """Reads `[add(a=1, b=2), now()]`, the tool calls of Llama 3.2 and 4.

  A text that does not start with `[` has no calls.

  Raises:
    FormatError: if it starts so, and is no list of calls with literals that
      JSON can write.
  """
  text = text.strip()
  if not text.startswith('['):
    return []
  try:
    calls = ast.parse(text, mode='eval').body.elts
    return [_pythonic_call(call) for call in calls]
  except (
    AttributeError,
    MemoryError,
    RecursionError,
    SyntaxError,
    TypeError,
    ValueError,
  ) as error:
    raise FormatError('write calls as [name(argument="value")]') from error


def _pythonic_call(call: ast.Call) -> ToolCall:
  """A call of a list; raises as it may where it is none."""
  arguments = {k.arg: ast.literal_eval(k.value) for k in call.keywords}
  if call.args or None in arguments:
    raise ValueError('arguments need names')
  json.dumps(arguments, allow_nan=False)  # Servers and clients pass them on so.
  return ToolCall(call.func.id, arguments)


def llama_json(text: str) -> list[ToolCall]:
  """Reads `{"name": …, "parameters": {…}}`, a whole turn of Llama 3.1.

  A text that does not start with `{` has no calls.

  Raises:
    FormatError: if it starts so, and is no such object.
  """
  text = text.strip().removeprefix('<|python_tag|>').lstrip()
  if not text.startswith('{'):
    return []
  return [_json_call(text, 'parameters')]


def hermes(text: str) -> list[ToolCall]:
  """Reads `<tool_call>{"name": …, "arguments": {…}}</tool_call>`.

  So Hermes and Qwen write tool calls. A text without the tag has no calls.

  Raises:
    FormatError: if a tag holds something else.
  """
  return [_json_call(part, 'arguments') for part in HERMES_CALL.findall(text)]


def _json_call(text: str, key: str) -> ToolCall:
  """The call of a JSON object, whose arguments are under `key`."""
  try:
    call = json.loads(text)
    name, arguments = call['name'], call.get(key, {})
  except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
    name = arguments = None
  if not isinstance(name, str) or not isinstance(arguments, dict):
    raise FormatError(
      f'write a call as {{"name": "tool", "{key}": {{"argument": "value"}}}}'
    )
  return ToolCall(name, arguments)


def react(text: str) -> list[ToolCall]:
  """Reads the last `Action: tool[argument]`, as in arXiv:2210.03629.

  Or `Action: tool` with `Action Input: …` in the next line, which is the
  argument, or an object of JSON with all arguments. An argument may have
  several lines; after `Action Input:` it ends with an empty one, unless it is
  such an object. A text without an action, or whose action is `Finish[…]`, has
  no calls.

  Raises:
    FormatError: if an action has neither form.
  """
  _, *actions = REACT_ACTION.split(text)
  if not actions:
    return []
  text = REACT_NEXT.split(actions[-1])[0]
  action, *given = map(str.strip, REACT_INPUT.split(text, maxsplit=1))
  given = ''.join(given)
  bracket = _react_bracket(action)
  name, argument = bracket or (action.partition('\n')[0].strip(), given)
  if name.lower() == 'finish':
    return []
  if not re.fullmatch(r'[\w.-]+', name) or bool(bracket) == bool(given):
    raise FormatError('write a call as Action: tool[argument]')
  try:
    arguments, end = json.JSONDecoder().raw_decode(argument)
  except (RecursionError, ValueError):
    arguments, end = None, 0
  is_whole = not bracket or end == len(argument.rstrip())
  if type(arguments) is not dict or not is_whole:
    arguments = argument if bracket else re.split(r'\n\s*\n', argument)[0]
  return [ToolCall(name, arguments)]


def _react_bracket(action: str) -> tuple[str, str] | None:
  """The tool and the argument of `tool[argument]`; None if it is not one.

  The first line is one by itself, or the bracket closes in a later one.
  """
  line = re.match(r'([\w.-]+)\[(.*)\][ \t]*$', action, re.M)
  if line:
    return line.groups()
  start = re.match(r'([\w.-]+)\[', action)
  depth = 1
  for i in range(start.end() if start else len(action), len(action)):
    depth += (action[i] == '[') - (action[i] == ']')
    if depth == 0:
      rest = action[i + 1 :].partition('\n')[0]
      argument = action[start.end() : i].strip('\n')
      return None if rest.strip() else (start[1], argument)
  return None


def react_answer(text: str) -> str:
  """The text behind `Final Answer:` or in `Finish[…]`; else all of it."""
  found = re.search(r'Final Answer:(.*)|Finish\[(.*)\]', text, re.S)
  return next(filter(None, found.groups()), '').strip() if found else text


def prompt(
  tokenizer,
  messages: Sequence[base.Message],
  *,
  chat: bool,
  tools: Sequence[dict] = (),
  has_turn: bool = True,
) -> str:
  """The text of a prompt, after which the model has its first turn.

  Args:
    tokenizer: of the model.
    messages: of the environment.
    chat: whether to render them by the chat template; else the prompt is their
      contents, one after the other.
    tools: JSON schemas, for the chat template.
    has_turn: whether the model has the turn at once; otherwise `opening` is
      what it reads before its first turn.
  """
  if not chat:
    return ''.join(map(_content, messages))
  return _template(
    tokenizer, messages, tools=list(tools) or None, has_turn=has_turn
  )


def _content(message: base.Message) -> str:
  """The content of a message as one text, also of several parts."""
  content = message.get('content') or ''
  if isinstance(content, str):
    return content
  return ''.join(part['text'] for part in content)


def check_tools(tokenizer, texts: Sequence[str], tools: Sequence[dict]):
  """Refuses tools that nothing tells the model of.

  A name in some of the questions, or within another word, declares no tool.

  Args:
    tokenizer: of the model.
    texts: of all prompts, by the chat template.
    tools: JSON schemas.

  Raises:
    ValueError: if the chat template leaves out a tool, and not every prompt
      names it.
  """
  names = [tool['function']['name'] for tool in tools]
  word = {
    name: re.compile(rf'(?<!\w){re.escape(name)}(?!\w)') for name in names
  }
  if missing := [x for x in names if not all(map(word[x].search, texts))]:
    raise ValueError(
      f'The chat template of {tokenizer.name_or_path} does not tell the model '
      f'of its tools {missing}: name them in the system prompt (SYSTEM in '
      'gin), and say how to call them.'
    )


def opening(
  tokenizer,
  before: Sequence[base.Message],
  messages: Sequence[base.Message],
  *,
  chat: bool,
  tools: Sequence[dict] = (),
) -> str:
  """The text between a prompt without a turn and the model's first turn.

  Args:
    tokenizer: of the model.
    before: messages of the prompt.
    messages: what the environment says then.
    chat: as in `prompt`.
    tools: likewise.

  Raises:
    ValueError: if the chat template writes the prompt in another way where more
      messages follow.
  """
  if not chat:
    return answer(tokenizer, messages, chat=False)
  start = prompt(tokenizer, before, chat=True, tools=tools, has_turn=False)
  text = prompt(tokenizer, [*before, *messages], chat=True, tools=tools)
  if not text.startswith(start):
    raise ValueError(
      f'The chat template of {tokenizer.name_or_path} writes the prompt of a '
      'role in another way once more messages follow, so that they cannot be '
      'appended: give the role a prompt that ends with a message of the user.'
    )
  return text[len(start) :]


def reply(
  tokenizer,
  before: Sequence[base.Message] | None,
  messages: Sequence[base.Message],
  *,
  chat: bool,
  tools: Sequence[dict] = (),
  keep_thoughts: bool = False,
) -> str:
  """The `opening` behind the prompt `before`; the `answer` if it is None."""
  if before is None:
    return answer(tokenizer, messages, chat=chat, keep_thoughts=keep_thoughts)
  return opening(tokenizer, before, messages, chat=chat, tools=tools)


def answer(
  tokenizer,
  messages: Sequence[base.Message],
  *,
  chat: bool,
  keep_thoughts: bool = False,
) -> str:
  """The text between the end token of a turn and the model's next turn.

  Without a chat template it is a line of the messages' contents.

  Args:
    tokenizer: of the model.
    messages: of the environment.
    chat: as in `prompt`.
    keep_thoughts: whether the thoughts of earlier turns may stay, as all that
      was sampled does, where the chat template would drop them.

  Raises:
    ValueError: if the chat template does not end a turn with the end token, or
      drops thoughts that may not stay.
  """
  if not chat:
    content = ' '.join(map(_content, messages))
    return f'\n{content}\n'
  before = [
    {'role': 'user', 'content': 'x'},
    {'role': 'assistant', 'content': TURN},
  ]
  text = _template(tokenizer, [*before, *messages])
  _, found, after = text.partition(TURN)
  end = tokenizer.eos_token
  if not found or not after.startswith(end):
    raise ValueError(
      f'The chat template of {tokenizer.name_or_path} does not end a turn of '
      f'the assistant with {end!r}: use the tokenizer of an instruct model '
      'whose end token is that of its turns.'
    )
  roles = tuple(message['role'] for message in messages)
  if not keep_thoughts and _drops_thoughts(
    tokenizer, tokenizer.chat_template, roles
  ):
    raise ValueError(
      f'The chat template of {tokenizer.name_or_path} drops the thoughts '
      f'(<think>) of earlier turns before messages of {", ".join(roles)}, and '
      'a conversation keeps all tokens that were sampled, so that the model '
      'would read what it does not read elsewhere: bind keep_thoughts = True '
      'to train it so, or use a template that keeps them.'
    )
  return after[len(end) :]


@functools.lru_cache(64)
def _drops_thoughts(tokenizer, template: str, roles: tuple[str, ...]) -> bool:
  """Whether thoughts of a turn vanish when messages of `roles` follow it.

  Args:
    tokenizer: of the model.
    template: its chat template.
    roles: of the messages.
  """
  del template  # A key of the cache: a tokenizer may get another one.
  turn = f'<think>\n{THOUGHT}\n</think>\n\n{TURN}'
  said = [{'role': role, 'name': 'x', 'content': 'x'} for role in roles]
  before = [
    {'role': 'user', 'content': 'x'},
    {'role': 'assistant', 'content': turn},
  ]
  return THOUGHT not in _template(tokenizer, [*before, *said])


def _template(tokenizer, messages, tools=None, has_turn: bool = True) -> str:
  if not tokenizer.chat_template:
    raise ValueError(
      f'The tokenizer of {tokenizer.name_or_path} has no chat template: give '
      'chat=False to put contents one after the other, or the folder of an '
      'instruct model.'
    )
  return chat_template.render(
    tokenizer,
    messages,
    'the messages of the environment',
    tools=tools,
    add_generation_prompt=has_turn,
  )
