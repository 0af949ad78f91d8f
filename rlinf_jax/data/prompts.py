"""Questions as tokens: encoded once, checked and filtered by length."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from rlinf_jax.data import chat, files, picture_files, text_arrays
from stages import base
from stages.language import tokens


class Opening(NamedTuple):
  """The functions that make prompts of questions, and what judges completions.

  Attributes:
    texts: `tokenizer, rows -> texts` of the prompts, with the arguments of
      `chat.texts`.
    references: `rows -> reference`, a tree of `text_arrays.Texts`, or of arrays
      with a row for each question, whose rows are `Problem.answer`.
  """

  texts: Callable[..., list[str]]
  references: Callable[[Sequence[files.Row]], Any]


def references(rows: Sequence[files.Row]) -> text_arrays.Reference:
  """The questions, answers and columns that rewards see, as `Texts`."""
  has_columns = any(row.columns for row in rows)
  return text_arrays.Reference(
    text_arrays.Texts([row.question for row in rows]),
    text_arrays.Texts([row.answer for row in rows]),
    text_arrays.Texts([row.columns for row in rows]) if has_columns else None,
  )


QUESTION = Opening(chat.texts, references)  # A model answers it at once.


class Prompts(NamedTuple):
  """Encoded questions.

  Attributes:
    encoded: the tokens and the pictures of each question.
    length: number of their tokens.
    reference: what judges completions, of each question.
    reader: of their pictures.
    room: most patches of a question.
  """

  encoded: list[picture_files.Encoded]
  length: np.ndarray
  reference: Any
  reader: picture_files.Reader
  room: int

  def batch(self, rows: np.ndarray, length: int) -> base.Problem:
    """The problems of some rows, padded on the left to `length` tokens."""
    prompt = self.reader.batch(
      [self.encoded[i] for i in rows], length=length, room=self.room
    )
    return base.Problem(prompt, jax.tree.map(lambda x: x[rows], self.reference))


def encode(
  tokenizer,
  rows: Sequence[files.Row],
  texts: Sequence[str],
  *,
  reader: picture_files.Reader,
  limit: int,
  drop_long: bool,
  name: str,
  chat: bool = True,
) -> tuple[list[files.Row], list[picture_files.Encoded]]:
  """Encodes the texts of questions, and leaves out those that are too long.

  Each square of a picture is one token.

  Args:
    tokenizer: of the model.
    rows: the questions.
    texts: their texts.
    reader: of their pictures.
    limit: the most tokens that a text may have.
    drop_long: whether longer ones are left out, with their number printed, or
      refused.
    name: of the file, for messages.
    chat: whether a chat template wrote the texts, which contain BOS already.

  Returns:
    The rows that are left, and their tokens and pictures.

  Raises:
    ValueError: for a text without tokens or with characters that the tokenizer
      does not know, for one over the limit that must not be left out, if none
      is left, or for pictures that the model cannot read.
  """
  kept, encoded, longest = [], [], 0
  start = () if chat else tokens.first_tokens(tokenizer)
  ids = tokenizer(list(texts), add_special_tokens=False)['input_ids']
  for row, text, token in zip(rows, texts, ids, strict=True):
    lost = tokens.lost_characters(tokenizer, text, token)
    if lost:
      raise ValueError(
        f'{row.where}, or what TEMPLATE, SYSTEM and the chat template put '
        f'around it, has {sorted(lost)}, which this tokenizer cannot encode: '
        'remove these characters, set TEMPLATE or SYSTEM without them, or use '
        'another model.'
      )
    if not token:
      raise ValueError(f'{row.where} has no tokens: leave the row out.')
    own = reader.encode([*start, *token], row.images, row.where)
    longest = max(longest, len(own.token))
    if len(own.token) <= limit:
      kept.append(row)
      encoded.append(own)
    elif not drop_long:
      raise ValueError(
        f'{row.where} has {len(own.token)} tokens and the limit is {limit}: '
        'raise prompt_length, or bind drop_long = True to leave such questions '
        'out.'
      )
  if not kept:
    raise ValueError(
      f'All {len(rows)} questions of {name} have more than {limit} tokens (the '
      f'longest has {longest}): raise prompt_length (PROMPT in gin).'
    )
  dropped = len(rows) - len(kept)
  over = f', {dropped} of more than {limit} tokens left out' if dropped else ''
  print(
    f'{name}: {len(kept)} questions, the longest of {longest} tokens{over}.',
    flush=True,
  )
  return kept, encoded


def prompts(
  rows: Sequence[files.Row],
  encoded: list[picture_files.Encoded],
  reader: picture_files.Reader,
  opening: Opening = QUESTION,
) -> Prompts:
  """Questions with their tokens and references."""
  return Prompts(
    encoded,
    np.array([len(x.token) for x in encoded]),
    opening.references(rows),
    reader,
    reader.room(encoded),
  )
