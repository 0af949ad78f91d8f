"""Bodies of requests for chat completions, checked field by field."""

from collections.abc import Mapping
import json
from typing import Any, NamedTuple

MAX_CHOICES = 8  # Of one request.
MAX_STOPS = 4
ROLES = ('system', 'developer', 'user', 'assistant', 'tool')
# Fields that are accepted with these values alone, which change nothing.
NEUTRAL = {
  'top_p': (1, None),
  'frequency_penalty': (0, None),
  'presence_penalty': (0, None),
  'logit_bias': ({}, None),
  'top_logprobs': (0, None),
  'response_format': ({'type': 'text'}, None),
  'parallel_tool_calls': (True, False, None),
  'store': (False, None),
  'metadata': ({}, None),
}
KNOWN = {
  *NEUTRAL,
  'model',
  'messages',
  'tools',
  'tool_choice',
  'stream',
  'stream_options',
  'logprobs',
  'max_tokens',
  'max_completion_tokens',
  'temperature',
  'stop',
  'seed',
  'n',
  'user',
}


IN_MESSAGES = {'role', 'content', 'name', 'tool_calls', 'tool_call_id'}


class RequestError(Exception):
  """A request that is refused, as OpenAI's API says it.

  Attributes:
    status: of HTTP.
    param: the field at fault; None without one.
    code: a word for programs; None without one.
  """

  def __init__(
    self,
    message: str,
    status: int = 400,
    param: str | None = None,
    code: str | None = None,
  ):
    super().__init__(message)
    self.status, self.param, self.code = status, param, code

  @property
  def body(self) -> dict:
    kind = 'invalid_request_error' if self.status < 500 else 'server_error'
    return {
      'error': {
        'message': str(self),
        'type': kind,
        'param': self.param,
        'code': self.code,
      }
    }


class ChatRequest(NamedTuple):
  """A request for chat completions.

  Attributes:
    messages: of the conversation, with contents as text.
    tools: their JSON schemas.
    stream: whether the reply is a stream of events.
    usage: whether the stream ends with the numbers of tokens.
    logprobs: whether log-probabilities are returned.
    limit: most tokens of a reply; None for the server's.
    temperature: of the sampling.
    stop: texts that end a reply, which does not have them.
    seed: of the sampling; None for a random one.
    n: replies.
  """

  messages: list[dict]
  tools: list[dict]
  stream: bool
  usage: bool
  logprobs: bool
  limit: int | None
  temperature: float
  stop: tuple[str, ...]
  seed: int | None
  n: int


def read_json(body: bytes) -> dict:
  """The JSON object of a body.

  Raises:
    RequestError: if it is none.
  """
  try:
    raw = json.loads(body)
    # An escape such as \ud800 alone is no character, and no reply can tell it.
    json.dumps(raw, ensure_ascii=False).encode()
  except (ValueError, RecursionError):
    raw = None
  if not isinstance(raw, dict):
    raise RequestError('The body is not a JSON object: send one in UTF-8.')
  return raw


def parse(raw: Mapping[str, Any], model: str) -> ChatRequest:
  """Checks a request.

  Args:
    raw: the body.
    model: name of the model that is served.

  Raises:
    RequestError: for a field that is unknown, or has a value that is.
  """
  for name, value in raw.items():
    if name not in KNOWN:
      raise _refused(name, 'is not supported: leave it out', 'unknown_field')
    if name in NEUTRAL and value not in NEUTRAL[name]:
      raise _refused(name, f'may only be {NEUTRAL[name][0]!r} here')
  if raw.get('model') != model:
    raise RequestError(
      f'The model served is {model!r}, not {str(raw.get("model"))[:200]!r}.',
      404,
      'model',
      'model_not_found',
    )
  if (choice := raw.get('tool_choice')) not in (None, 'auto', 'none'):
    raise _refused('tool_choice', "may be 'auto' or 'none' here")
  options = raw.get('stream_options') or {}
  _check(
    isinstance(options, dict) and options.keys() <= {'include_usage'},
    'stream_options',
    'may have include_usage alone here',
  )
  limit = _integer(raw, 'max_completion_tokens', 1, 2**31 - 1)
  old_limit = _integer(raw, 'max_tokens', 1, 2**31 - 1)
  tools = _tools(raw.get('tools'))
  return ChatRequest(
    messages=_messages(raw.get('messages')),
    tools=[] if choice == 'none' else tools,
    stream=_flag(raw, 'stream'),
    usage=_flag(options, 'include_usage'),
    logprobs=_flag(raw, 'logprobs'),
    limit=limit if limit is not None else old_limit,
    temperature=_temperature(raw.get('temperature')),
    stop=_stop(raw.get('stop')),
    seed=_integer(raw, 'seed', -(2**63), 2**63 - 1),
    n=_integer(raw, 'n', 1, MAX_CHOICES) or 1,
  )


def _refused(name: str, why: str, code: str | None = None) -> RequestError:
  return RequestError(f'{name[:100]!r} {why}.', 400, name[:100], code)


def _check(holds: bool, name: str, why: str):
  if not holds:
    raise _refused(name, why)


def _flag(raw: Mapping, name: str) -> bool:
  value = raw.get(name)
  _check(value in (None, True, False), name, 'must be true or false')
  return bool(value)


def _integer(raw: Mapping, name: str, low: int, high: int) -> int | None:
  value = raw.get(name)
  if value is None:
    return None
  fits = type(value) is int and low <= value <= high
  _check(fits, name, f'must be a whole number from {low} to {high}')
  return value


def _temperature(value) -> float:
  if value is None:
    return 1.0
  fits = type(value) in (int, float) and (value == 0 or 0.01 <= value <= 2)
  _check(fits, 'temperature', 'must be 0, or from 0.01 to 2')
  return float(value)


def _stop(value) -> tuple[str, ...]:
  texts = [value] if isinstance(value, str) else value or []
  fits = isinstance(texts, list) and len(texts) <= MAX_STOPS
  fits = fits and all(isinstance(x, str) and x for x in texts)
  _check(fits, 'stop', f'must be a text, or a list of up to {MAX_STOPS}')
  return tuple(texts)


def _tools(value) -> list[dict]:
  tools = value or []
  fits = isinstance(tools, list) and all(
    isinstance(x, dict)
    and x.get('type') == 'function'
    and isinstance(x.get('function'), dict)
    and isinstance(x['function'].get('name'), str)
    for x in tools
  )
  _check(fits, 'tools', 'must be a list of functions with names')
  return tools


def _messages(value) -> list[dict]:
  fits = isinstance(value, list) and value
  _check(bool(fits), 'messages', 'must be a list of messages')
  return [_message(x) for x in value]


def _message(x) -> dict:
  fits = isinstance(x, dict) and x.get('role') in ROLES
  _check(fits, 'messages', f'must have objects with a role of {ROLES}')
  content, calls = x.get('content'), x.get('tool_calls')
  # Clients send empty fields of replies back, such as `refusal`.
  unknown = [k for k, value in x.items() if value and k not in IN_MESSAGES]
  _check(not unknown, 'messages', f'may not have {unknown!r:.100} here')
  if isinstance(content, list):
    parts = all(
      isinstance(p, dict)
      and p.get('type') == 'text'
      and isinstance(p.get('text'), str)
      for p in content
    )
    _check(parts, 'messages', 'must have contents of text alone')
    content = ''.join(p['text'] for p in content)
  _check(
    isinstance(content, str) or (content is None and bool(calls)),
    'messages',
    'must have contents of text',
  )
  role = 'system' if x['role'] == 'developer' else x['role']
  message = {'role': role, 'content': content or ''}
  if calls:
    message['tool_calls'] = _calls(calls)
  for name in ('name', 'tool_call_id'):
    if isinstance(x.get(name), str):
      message[name] = x[name]
  return message


def _calls(calls) -> list[dict]:
  fits = isinstance(calls, list) and all(
    isinstance(c, dict)
    and isinstance(c.get('function'), dict)
    and isinstance(c['function'].get('name'), str)
    and isinstance(c['function'].get('arguments'), str)
    for c in calls
  )
  _check(fits, 'messages', 'must have tool_calls with names and arguments')
  return calls
