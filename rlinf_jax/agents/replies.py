"""Replies of the model as OpenAI's API writes them."""

from collections.abc import Callable, Sequence
import json
import re
import secrets
from typing import NamedTuple

from rlinf_jax.agents import formats
from stages.language import tokens

UNKNOWN = '\ufffd'  # Stands for bytes that are no character yet.
SPACE = '\u2581'  # Stands for a space in vocabularies of SentencePiece.


class Text(NamedTuple):
  """The text of ids so far.

  Attributes:
    text: up to a stop text, if one was found.
    is_stopped: whether one was.
  """

  text: str
  is_stopped: bool


def text(tokenizer, ids: Sequence[int], stop: Sequence[str]) -> Text:
  """The text of a reply without its end token."""
  whole = tokenizer.decode(ids, skip_special_tokens=True)
  found = [i for i in map(whole.find, stop) if i >= 0]
  return Text(whole[: min(found)], True) if found else Text(whole, False)


def settled(text: str, stop: Sequence[str]) -> str:
  """The beginning of an unfinished text that later tokens cannot change.

  A character of several tokens is not settled, nor is what may become a stop
  text.
  """
  text = text.rstrip(UNKNOWN)
  held = max((len(x) - 1 for x in stop), default=0)
  return text[: len(text) - held] if held else text


def message(
  text: str, tools: Sequence[dict], parse: Callable[[str], list]
) -> dict:
  """The reply as a message; calls that can be read are `tool_calls`.

  Args:
    text: of the reply.
    tools: of the request; without any, calls stay text.
    parse: `text -> calls`, as in `formats`.
  """
  try:
    calls = parse(text) if tools else []
  except formats.FormatError:
    calls = []  # The agent sees what was written instead.
  if not calls:
    return {'role': 'assistant', 'content': text}
  before = text.split('<tool_call>')[0] if parse is formats.hermes else ''
  return {
    'role': 'assistant',
    'content': before.strip() or None,
    'tool_calls': [
      {
        'id': f'call_{secrets.token_hex(12)}',
        'type': 'function',
        'function': {
          'name': call.name,
          'arguments': json.dumps(call.arguments),
        },
      }
      for call in calls
    ],
  }


def finish_reason(message: dict, has_ended: bool) -> str:
  """Why a reply ended: 'tool_calls', 'stop' or 'length'."""
  if not has_ended:
    return 'length'
  return 'tool_calls' if message.get('tool_calls') else 'stop'


def logprobs(
  tokenizer, ids: Sequence[int], logp: Sequence[float], start: int = 0
) -> dict:
  """Log-probabilities of the tokens of a reply.

  Args:
    tokenizer: of the model.
    ids: of the whole reply.
    logp: of each.
    start: the first that is told of.
  """
  rows = []
  for i in range(start, len(ids)):
    text, data = token_text(tokenizer, ids[i], is_first=i == 0)
    rows.append(
      {
        'token': text,
        'logprob': logp[i],
        'bytes': list(data),
        'top_logprobs': [],
      }
    )
  return {'content': rows, 'refusal': None}


def token_text(tokenizer, token: int, is_first: bool) -> tuple[str, bytes]:
  """The text of a token, and its bytes, which may be a part of a character.

  Args:
    tokenizer: of the model.
    token: its id.
    is_first: whether it begins a text; some tokenizers drop a space there.
  """
  text, piece = (
    tokenizer.decode([token]),
    tokenizer.convert_ids_to_tokens(token),
  )
  if not is_first and piece.startswith(SPACE) and not text.startswith(' '):
    text = f' {text}'
  if UNKNOWN not in text:
    return text, text.encode()
  if byte := re.fullmatch('<0x([0-9A-F]{2})>', piece):
    return text, bytes.fromhex(byte[1])
  letters = tokens.byte_of_letter()
  if all(x in letters for x in piece):
    return text, bytes(letters[x] for x in piece)
  return text, text.encode()


def usage(prompt: int, completion: int) -> dict:
  """Numbers of tokens."""
  return {
    'prompt_tokens': prompt,
    'completion_tokens': completion,
    'total_tokens': prompt + completion,
  }


def delta(message: dict) -> dict:
  """The calls of a message as a stream writes them."""
  calls = message.get('tool_calls')
  if not calls:
    return {}
  return {'tool_calls': [{'index': i, **call} for i, call in enumerate(calls)]}


def event(x: dict | str) -> str:
  """A server-sent event."""
  data = x if isinstance(x, str) else json.dumps(x)
  return f'data: {data}\n\n'
