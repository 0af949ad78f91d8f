"""Texts of conversations, by the chat template of a tokenizer.

A chat template is a program of those who published the checkpoint.
`transformers` runs it in a sandbox of Jinja, from which it reaches nothing, but
which has no limits: a template may loop for days, or write a gigabyte. Here it
has a limit of time and limits of size, and every error is a sentence.
"""

from collections.abc import Mapping, Sequence
import functools
import queue
import threading
from typing import Any

from rlinf_jax.system import threads

SECONDS = 5.0  # That a template may take.
LONGEST = 1 << 24  # Characters that it may write, or entries that it may make.
MAX_BITS = 1 << 16  # Of a whole number that it computes.


def render(
  tokenizer, messages: Sequence[Mapping[str, Any]], what: str, **kwargs
) -> str:
  """The text of a conversation.

  Args:
    tokenizer: with a chat template.
    messages: the conversation, as chat templates take it.
    what: these messages in words, for the error.
    **kwargs: of `apply_chat_template`, such as `add_generation_prompt`.

  Raises:
    ValueError: if the template refuses them, takes too long or writes too
      much, or if they have characters that are not Unicode.
  """
  done: queue.SimpleQueue = queue.SimpleQueue()

  def run():
    try:
      _bound_operators()
      done.put(
        tokenizer.apply_chat_template(list(messages), tokenize=False, **kwargs)
      )
    except Exception as error:  # noqa: BLE001 (Foreign code: any may come.)
      done.put(error)
    except SystemExit:  # By `threads.end`.
      pass

  thread = threading.Thread(target=run, name='chat_template', daemon=True)
  thread.start()
  try:
    text = done.get(timeout=SECONDS)
  except queue.Empty:
    text = TimeoutError(f'it takes more than {SECONDS:g} s')
    # A template that loops would take a core as long as the process lives.
    threads.end(thread)
  if isinstance(text, str):
    text = _fault(text) or text
  if isinstance(text, Exception):
    raise ValueError(
      f'The chat template of {tokenizer.name_or_path} refuses {what}: '
      f'{" ".join(str(text).split())[:300].rstrip(".")}.'
    ) from text
  return text


@functools.cache
def _bound_operators():
  """Bounds `*` and `**` in templates that `transformers` compiles from now on.

  They compute outside Python, where no limit of time ends them.
  """
  from transformers.utils import chat_template_utils

  class Environment(chat_template_utils.ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(['*', '**'])

    def call_binop(self, context, operator, left, right):
      _check_size(operator, left, right)
      return super().call_binop(context, operator, left, right)

  chat_template_utils.ImmutableSandboxedEnvironment = Environment


def _check_size(operator: str, left: Any, right: Any):
  """Raises a ValueError if the result of an operator would be too large."""
  if isinstance(left, int) and isinstance(right, int):
    bits = abs(left).bit_length()
    bits = bits * right if operator == '**' else bits + right.bit_length()
    if bits > MAX_BITS:
      raise ValueError(f'{operator} makes a number of over {MAX_BITS:,} bits')
  for x, times in ((left, right), (right, left)):
    repeats = (
      operator == '*' and isinstance(times, int) and hasattr(x, '__len__')
    )
    if repeats and len(x) * times > LONGEST:
      raise ValueError(f'* makes a text or a list of over {LONGEST:,} entries')


def _fault(text: str) -> ValueError | None:
  """Why a text cannot be used, if so."""
  if len(text) > LONGEST:
    return ValueError(f'it writes more than {LONGEST:,} characters')
  try:
    text.encode()
  except UnicodeEncodeError as error:
    return ValueError(f'{error.object[error.start]!r} is not Unicode')
  return None
