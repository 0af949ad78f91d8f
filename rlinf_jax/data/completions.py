"""Prompts with one completion to imitate, or with a preferred one, from files.

{"prompt": "2+2=", "completion": "4"}
{"messages": [..., {"role": "assistant", "content": "4"}]}
{"prompt": "2+2=", "chosen": "4", "rejected": "5"}
"""

from collections.abc import Sequence
import functools
from typing import Any, NamedTuple

import numpy as np

from rlinf_jax.config import suggestions
from rlinf_jax.data import chat as chat_lib
from rlinf_jax.data import files, picture_files, pictures
from stages import base
from stages.language import tokens

# Columns that may hold the completion; the first that a file has is used.
COMPLETION_COLUMNS = ('completion', 'response', 'output', 'answer')
MESSAGES = 'messages'


class Row(NamedTuple):
  """A prompt with its completions.

  Attributes:
    prompt: the question, or the messages of a conversation so far.
    completions: one to imitate, or the preferred and the rejected one.
    where: file and line, for error messages.
    images: its pictures.
  """

  prompt: str | tuple[files.Message, ...]
  completions: tuple[str, ...]
  where: str
  images: tuple[pictures.Image, ...] = ()


def read_examples(
  path: str,
  *,
  prompt_column: str | None = None,
  completion_column: str | None = None,
  image_column: str | None = None,
) -> list[Row]:
  """Reads prompts with a completion to imitate.

  Args:
    path: as for `files.read`.
    prompt_column: the column of prompts; by default, the first of
      `files.PROMPT_COLUMNS` that the file has.
    completion_column: the column of completions; by default, the first of
      `COMPLETION_COLUMNS` that it has. A file without one, but with a column
      of messages, has conversations whose last message is the completion. So
      has one whose prompts would be messages that end with a reply, as where
      `answer` is what a reward compares with.
    image_column: as for `files.read`.

  Raises:
    ImportError: as `files.records`.
    OSError: likewise.
    ValueError: likewise, for a missing column, or a row without a prompt or a
      completion; names the line.
  """
  rows = []
  for where, row in files.records(path):
    if not rows:
      prompt_column, completion_column = _example_columns(
        _Columns(row, where), prompt_column, completion_column
      )
    prompt = ()
    if completion_column != MESSAGES:
      prompt = files.checked_prompt(
        row.get(prompt_column), prompt_column, where
      )
    found = _row(prompt, row, (completion_column,), where)
    prompt, images = pictures.attach(
      found.prompt, row, files.expand(path).parent, where, image_column
    )
    rows.append(found._replace(prompt=prompt, images=images))
  return rows


def read_preferences(
  path: str,
  *,
  prompt_column: str | None = None,
  chosen_column: str = 'chosen',
  rejected_column: str = 'rejected',
  image_column: str | None = None,
) -> list[Row]:
  """Reads prompts with a preferred and a rejected completion.

  A completion is text, or a list of messages that ends with the assistant's. A
  file whose completions are conversations needs no column of prompts.

  Args:
    path: as for `files.read`.
    prompt_column: the column of prompts; by default, the first of
      `files.PROMPT_COLUMNS` that the file has, if it has one.
    chosen_column: the column of preferred completions.
    rejected_column: the column of rejected completions.
    image_column: as for `files.read`.

  Raises:
    ImportError: as `files.records`.
    OSError: likewise.
    ValueError: likewise, for a missing column, a row without one of the three,
      or conversations that differ before their last messages; names the line.
  """
  rows, columns = [], (chosen_column, rejected_column)
  for where, row in files.records(path):
    if not rows:
      find = _Columns(row, where)
      find.column('chosen_column', chosen_column)
      find.column('rejected_column', rejected_column)
      # Conversations need no column of prompts.
      if not isinstance(row[chosen_column], list) or find.has_any(
        prompt_column, files.PROMPT_COLUMNS
      ):
        prompt_column = find.column(
          'prompt_column', prompt_column, files.PROMPT_COLUMNS
        )
    prompt = ()
    if prompt_column:
      prompt = files.checked_prompt(
        row.get(prompt_column), prompt_column, where
      )
    found = _row(prompt, row, columns, where)
    prompt, images = pictures.attach(
      found.prompt, row, files.expand(path).parent, where, image_column
    )
    rows.append(found._replace(prompt=prompt, images=images))
  return rows


class _Columns:
  """The columns of a file, by its first row."""

  def __init__(self, row, where: str):
    self._row, self._where = row, where

  def has_any(self, given: str | None, usual: Sequence[str]) -> bool:
    """Whether a column is given, or a usual one exists."""
    return given is not None or not self._row.keys().isdisjoint(usual)

  def ends_with_reply(self, name: str) -> bool:
    """Whether a column has messages, of which the assistant has the last."""
    messages = self._row[name]
    last = messages[-1] if isinstance(messages, list) and messages else None
    return isinstance(last, dict) and last.get('role') == 'assistant'

  def column(
    self,
    argument: str,
    given: str | None,
    usual: Sequence[str] = (),
    otherwise: str | None = None,
  ) -> str:
    """The column that is given, or the first usual one that exists."""
    for name in (given,) if given else (*usual, otherwise):
      if name in self._row:
        return name
    needed = suggestions.join_names((given,) if given else usual)
    raise ValueError(
      f'{self._where} has no column {needed}; its columns are '
      f'{suggestions.join_names(self._row)}: bind {argument} to one of them.'
    )


def _example_columns(
  find: _Columns, prompt: str | None, completion: str | None
) -> tuple[str | None, str]:
  """The columns of prompts and of completions, as `read_examples` is given."""
  found = find.column(
    'completion_column', completion, COMPLETION_COLUMNS, MESSAGES
  )
  if found == MESSAGES:
    return prompt, found
  prompt = find.column('prompt_column', prompt, files.PROMPT_COLUMNS)
  if not completion and prompt == MESSAGES and find.ends_with_reply(prompt):
    return prompt, MESSAGES
  return prompt, found


def _row(prompt, row: dict[str, Any], columns, where: str) -> Row:
  """A row; its prompt may be the messages that its conversations share."""
  pairs = [_completion(row.get(column), column, where) for column in columns]
  before = [messages for messages, _ in pairs if messages]
  if before and any(messages != before[0] for messages in before):
    raise ValueError(
      f'{where} has conversations that differ before their last messages: give '
      'two replies to the same messages.'
    )
  if before:
    prompt = tuple(before[0])
  if not prompt:
    raise ValueError(
      f'{where} has no question before the reply: begin with messages of the '
      'user, or add a column of prompts.'
    )
  if before:
    files.checked_prompt(list(before[0]), columns[0], where)
  return Row(prompt, tuple(text for _, text in pairs), where)


def _completion(value: Any, column: str, where: str):
  """The messages before a completion, and its text."""
  before, text = [], value
  if isinstance(value, list) and value:
    files.check_messages(value, column, where)
    *before, last = value
    if last['role'] != 'assistant':
      raise ValueError(
        f'{where} ends with a message of the {last["role"]} in {column!r}: end '
        'it with the reply of the assistant.'
      )
    text = pictures.text_of(last['content'])
  if not isinstance(text, str) or not text.strip():
    raise ValueError(
      f'{where} has no completion in {column!r}: give it a text or a list of '
      'messages, or leave the row out.'
    )
  return before, files.checked_text(text, where)


class Encoded(NamedTuple):
  """Encoded prompts and completions.

  Attributes:
    prompt: the tokens and pictures of each prompt.
    completions: the tokens of its completions, end tokens included.
    reader: of the pictures.
  """

  prompt: list[picture_files.Encoded]
  completions: list[tuple[list[int], ...]]
  reader: picture_files.Reader

  def batch(
    self,
    rows: np.ndarray,
    prompt_length: int,
    response_length: int,
    room: int = 0,
  ) -> base.Example:
    """The examples of some rows; completions of a prompt are adjacent rows."""
    prompts, actions = [], []
    for i in rows:
      for completion in self.completions[i]:
        prompts.append(self.prompt[i])
        actions.append(completion)
    action_BT = np.zeros((len(actions), response_length), np.int32)
    mask_BT = np.zeros((len(actions), response_length), np.float32)
    for i, action in enumerate(actions):
      action_BT[i, : len(action)] = action
      mask_BT[i, : len(action)] = 1.0
    prompt = self.reader.batch(prompts, length=prompt_length, room=room)
    return base.Example(prompt, action_BT, mask_BT)


def encode(
  tokenizer,
  rows: Sequence[Row],
  *,
  reader: picture_files.Reader,
  stop: Sequence[int],
  prompt_length: int,
  response_length: int,
  drop_long: bool,
  name: str,
  chat: bool = True,
  system_prompt: str | None = None,
  template: str = '{prompt}',
) -> Encoded:
  """Encodes prompts and completions; leaves out those that are too long.

  A completion ends with an end token, as a completion that a policy samples
  does: that of the chat template, or else `stop[0]`.

  Args:
    tokenizer: tokenizer of the model.
    rows: prompts with completions.
    reader: of their pictures.
    stop: ids of the tokens that end a completion; at least one.
    prompt_length: the most tokens of a prompt.
    response_length: the most tokens of a completion, its end token included.
    drop_long: whether longer rows are left out, and their number printed; else
      they are an error.
    name: name of the file, for messages.
    chat: as for `chat.texts`.
    system_prompt: likewise.
    template: likewise.

  Raises:
    ValueError: for texts that the tokenizer cannot encode, for a row over a
      limit unless `drop_long`, or if no row is left.
  """
  shape = {'system_prompt': system_prompt, 'template': template}
  texts = chat_lib.texts(tokenizer, rows, chat=chat, **shape)
  kept, dropped = Encoded([], [], reader), 0
  whole = lambda x: tokenizer(x, add_special_tokens=False)['input_ids']
  behind = functools.partial(tokens.continue_with, tokenizer)
  for row, text in zip(rows, texts, strict=True):
    completions = row.completions
    if chat:
      completions = [
        _reply(tokenizer, row, text, completion, shape)
        for completion in completions
      ]
    start = () if chat else tokens.first_tokens(tokenizer)
    token = [*start, *_checked(tokenizer, text, whole(text), row.where)]
    prompt = reader.encode(token, row.images, row.where)
    replies = [
      _ended(_checked(tokenizer, x, behind(x), row.where), stop, row.where)
      for x in completions
    ]
    sizes = len(prompt.token), max(map(len, replies))
    if sizes[0] <= prompt_length and sizes[1] <= response_length:
      kept.prompt.append(prompt)
      kept.completions.append(tuple(replies))
    elif drop_long:
      dropped += 1
    else:
      raise ValueError(
        f'{row.where} has a prompt of {sizes[0]} tokens and a completion of '
        f'{sizes[1]}, and the limits are {prompt_length} and '
        f'{response_length}: raise prompt_length or response_length, or bind '
        'drop_long = True to leave such rows out.'
      )
  if not kept.prompt:
    raise ValueError(
      f'All {len(rows)} rows of {name} have a prompt of more than '
      f'{prompt_length} tokens or a completion of more than {response_length}: '
      'raise prompt_length or response_length.'
    )
  over = f', {dropped} over the limits left out' if dropped else ''
  print(f'{name}: {len(kept.prompt)} rows{over}.', flush=True)
  return kept


def _reply(tokenizer, row: Row, text: str, completion: str, shape) -> str:
  """The text that a chat template writes after the text of a prompt."""
  whole = chat_lib.answered_text(tokenizer, row, completion, **shape)
  if not whole.startswith(text):
    raise ValueError(
      f'The chat template of {tokenizer.name_or_path} writes the question of '
      f'{row.where} in another way once it is answered, so the completion '
      'cannot be told from the prompt: bind CHAT = False, or use another '
      'template.'
    )
  return whole[len(text) :].rstrip()


def _checked(tokenizer, text: str, row: list[int], where: str) -> list[int]:
  """The tokens `row` of a text, all of whose characters are known."""
  lost = tokens.lost_characters(tokenizer, text, row)
  if lost or not row:
    raise ValueError(
      f'{where} has {sorted(lost) or "a text without tokens"}, which this '
      'tokenizer cannot encode: remove it, or use another model.'
    )
  return row


def _ended(row: list[int], stop: Sequence[int], where: str) -> list[int]:
  """The tokens of a completion, and an end token if it lacks one."""
  if any(token in stop for token in row[:-1]):
    raise ValueError(
      f'{where} has a completion that goes on behind an end token, where none '
      'that a policy samples would: remove what follows it.'
    )
  return row if row[-1] in stop else [*row, stop[0]]
