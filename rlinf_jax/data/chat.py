"""Texts of prompts: a template of the question, in the model's chat format."""

from collections.abc import Sequence
import functools

from rlinf_jax.data import chat_template, files, pictures


def texts(
  tokenizer,
  rows: Sequence[files.Row],
  *,
  chat: bool = True,
  system_prompt: str | None = None,
  template: str = '{prompt}',
) -> list[str]:
  """The texts that a model completes, one a row.

  Args:
    tokenizer: of the model.
    rows: questions.
    chat: whether to wrap them in the chat template of the tokenizer.
    system_prompt: system message of conversations that have none.
    template: what to make of a question, in terms of `{prompt}`; messages are
      left as they are.

  Raises:
    ValueError: if a template is asked for that does not exist, or refuses the
      messages.
  """
  check_template(template)
  if chat and not tokenizer.chat_template:
    raise ValueError(
      f'The tokenizer of {tokenizer.name_or_path} has no chat template: bind '
      'CHAT = False to complete questions as they are, or give the folder of '
      'an instruct model.'
    )
  if system_prompt and not chat:
    raise ValueError(
      'A system prompt needs the chat template: bind CHAT = True, or put its '
      'text into the template of questions.'
    )
  return [_text(tokenizer, row, chat, system_prompt, template) for row in rows]


def check_template(template: str):
  """Raises ValueError for a template of questions without a place for one."""
  if '{prompt}' not in template:
    raise ValueError(
      f'The template {template!r} does not say where the question goes: put '
      '{prompt} there.'
    )


def _text(tokenizer, row: files.Row, chat, system_prompt, template) -> str:
  """The text of one row."""
  if chat:
    messages = _messages(row, system_prompt, template)
    refuse_control_tokens(tokenizer, messages, row.where)
    return chat_template.render(
      tokenizer, messages, row.where, add_generation_prompt=True
    )
  if row.images:
    raise ValueError(
      f'{row.where} has pictures, whose places the chat template writes: bind '
      'CHAT = True.'
    )
  if not isinstance(row.prompt, str):
    raise ValueError(
      f'{row.where} has messages, which need a chat template: bind CHAT = '
      'True, or give questions as text.'
    )
  return template.replace('{prompt}', row.prompt)


def refuse_control_tokens(
  tokenizer, messages: Sequence[files.Message], where: str
):
  """Refuses messages in which the model would read its own control tokens.

  Only the chat template may end a turn or begin another.

  Raises:
    ValueError: for a message that contains the text of such a token.
  """
  control = _control_tokens(tokenizer)
  for message in messages:
    content = message.get('content')
    parts = [content] if isinstance(content, str) else content or ()
    for part in parts:
      text = part if isinstance(part, str) else part.get('text') or ''
      found = sorted(x for x in control if x in text)
      if found:
        raise ValueError(
          f'{where} contains {found[0]!r}, a control token of '
          f'{tokenizer.name_or_path}: remove it, or bind CHAT = False for '
          'texts that are in the chat format already.'
        )


@functools.lru_cache(maxsize=16)
def _control_tokens(tokenizer) -> frozenset[str]:
  added = tokenizer.added_tokens_decoder.values()
  return frozenset(x.content for x in added if x.special)


def answered_text(
  tokenizer,
  row: files.Row,
  answer: str,
  *,
  system_prompt: str | None = None,
  template: str = '{prompt}',
) -> str:
  """The text of a conversation with its answer, in the chat template.

  Args:
    tokenizer: of the model.
    row: the question.
    answer: the reply of the assistant.
    system_prompt: as in `texts`.
    template: likewise.
  """
  messages = [
    *_messages(row, system_prompt, template),
    {'role': 'assistant', 'content': answer},
  ]
  return chat_template.render(tokenizer, messages, row.where)


def _messages(row: files.Row, system_prompt, template) -> list[files.Message]:
  """A question as the messages of a conversation."""
  if isinstance(row.prompt, str):
    question = template.replace('{prompt}', row.prompt)
    content = pictures.parts(question) if row.images else question
    messages = [{'role': 'user', 'content': content}]
  else:
    messages = list(row.prompt)
  if system_prompt and messages[0]['role'] != 'system':
    messages = [{'role': 'system', 'content': system_prompt}, *messages]
  return messages
