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

from rlinf_jax.data import template_limits
from rlinf_jax.system import threads

SECONDS = 5.0  # That a template may take.


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
      _limit_sizes()
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
def _limit_sizes():
  """Limits the sizes of templates that `transformers` compiles from now on."""
  from transformers.utils import chat_template_utils

  chat_template_utils.ImmutableSandboxedEnvironment = (
    template_limits.Environment
  )


def _fault(text: str) -> ValueError | None:
  """Why a text cannot be used, if so."""
  if len(text) > template_limits.LONGEST:
    return ValueError(
      f'it writes more than {template_limits.LONGEST:,} characters'
    )
  try:
    text.encode()
  except UnicodeEncodeError as error:
    return ValueError(f'{error.object[error.start]!r} is not Unicode')
  return None
