"""Sources of examples and of preferences from files of your own."""

from collections.abc import Callable, Mapping, Sequence
import pathlib
from typing import Any

import numpy as np

from rlinf_jax.data import completions, files, mixtures, picture_files
from stages import base, ranges, source_files
from stages.language import stops, tokens


def examples(
  checkpoint: str,
  *,
  train: str | Sequence[str] | Mapping[str, float],
  held_out: str | Sequence[str],
  batch_size: ranges.PositiveInt,
  prompt_length: ranges.PositiveInt,
  response_length: ranges.PositiveInt,
  held_out_batch: ranges.PositiveInt = 64,
  held_out_rows: ranges.PositiveInt | None = None,
  prompt_column: str | None = None,
  completion_column: str | None = None,
  chat: bool = True,
  system_prompt: str | None = None,
  template: str = '{prompt}',
  drop_long: bool = False,
  image_column: str | None = None,
  min_pixels: ranges.PositiveInt | None = None,
  max_pixels: ranges.PositiveInt | None = None,
) -> base.Source:
  """A source of prompts with completions to imitate, for `workflows.sft`.

  Batches are `base.Example`s, in the order of `questions.questions`. Held-out
  batches are examples, too; rows without completion tokens fill up the last
  one.

  Args:
    checkpoint: folder of the model whose tokenizer to use.
    train: a file of examples, several, or `{file: weight}`, where weights are
      the shares of files in every batch.
    held_out: a file of examples for evaluation, or several.
    batch_size: examples a batch.
    prompt_length: the most tokens of a prompt.
    response_length: the most tokens of a completion, its end token included.
    held_out_batch: held-out examples a batch.
    held_out_rows: how many examples of the held-out files to use, from the
      first on; None for all.
    prompt_column: as `completions.read_examples`.
    completion_column: likewise.
    chat: as `chat.texts`.
    system_prompt: likewise.
    template: likewise.
    drop_long: whether rows over a limit are left out; else they are an error.
    image_column: as for `files.read`.
    min_pixels: as `picture_files.reader`.
    max_pixels: likewise.
  """

  def read(path):
    return completions.read_examples(
      path,
      prompt_column=prompt_column,
      completion_column=completion_column,
      image_column=image_column,
    )

  return _source(
    checkpoint,
    read,
    picture_files.reader(checkpoint, min_pixels, max_pixels),
    train=train,
    held_out=held_out,
    batch_size=batch_size,
    held_out_batch=held_out_batch,
    held_out_rows=held_out_rows,
    prompt_length=prompt_length,
    response_length=response_length,
    chat=chat,
    system_prompt=system_prompt,
    template=template,
    drop_long=drop_long,
  )


def preferences(
  checkpoint: str,
  *,
  train: str | Sequence[str] | Mapping[str, float],
  held_out: str | Sequence[str],
  batch_size: ranges.PositiveInt,
  prompt_length: ranges.PositiveInt,
  response_length: ranges.PositiveInt,
  held_out_batch: ranges.PositiveInt = 64,
  held_out_rows: ranges.PositiveInt | None = None,
  prompt_column: str | None = None,
  chosen_column: str = 'chosen',
  rejected_column: str = 'rejected',
  image_column: str | None = None,
  chat: bool = True,
  system_prompt: str | None = None,
  template: str = '{prompt}',
  drop_long: bool = False,
) -> base.Source:
  """A source of pairs of completions, for `workflows.dpo`.

  Batches are `base.Example`s. A pair is two adjacent rows, the preferred
  completion first, so a batch has twice as many rows as pairs.

  Args:
    checkpoint: as for `examples`.
    train: likewise.
    held_out: likewise.
    batch_size: pairs a batch.
    prompt_length: as for `examples`.
    response_length: likewise.
    held_out_batch: held-out pairs a batch.
    held_out_rows: how many pairs of the held-out files to use, from the first
      on; None for all.
    prompt_column: as `completions.read_preferences`.
    chosen_column: likewise.
    rejected_column: likewise.
    image_column: as for `files.read`.
    chat: as `chat.texts`.
    system_prompt: likewise.
    template: likewise.
    drop_long: as for `examples`.
  """

  def read(path):
    return completions.read_preferences(
      path,
      prompt_column=prompt_column,
      chosen_column=chosen_column,
      rejected_column=rejected_column,
      image_column=image_column,
    )

  return _source(
    checkpoint,
    read,
    picture_files.reader(checkpoint),
    train=train,
    held_out=held_out,
    batch_size=batch_size,
    held_out_batch=held_out_batch,
    held_out_rows=held_out_rows,
    prompt_length=prompt_length,
    response_length=response_length,
    chat=chat,
    system_prompt=system_prompt,
    template=template,
    drop_long=drop_long,
  )


def _source(
  checkpoint: str,
  read: Callable[[str], list[completions.Row]],
  reader: picture_files.Reader,
  *,
  train: str | Sequence[str] | Mapping[str, float],
  held_out: str | Sequence[str],
  batch_size: int,
  held_out_batch: int,
  held_out_rows: int | None,
  prompt_length: int,
  response_length: int,
  **text: Any,
) -> base.Source:
  """A source of the rows that `read` finds in files.

  Args:
    checkpoint: as for `examples`.
    read: `path -> rows`.
    reader: of their pictures.
    train: as for `examples`.
    held_out: likewise.
    batch_size: likewise.
    held_out_batch: likewise.
    held_out_rows: likewise.
    prompt_length: likewise.
    response_length: likewise.
    **text: other arguments of `completions.encode`.
  """
  tokenizer = tokens.load_tokenizer(checkpoint)
  stop = _stop(checkpoint)
  lengths = prompt_length, response_length

  def load(path: str) -> completions.Encoded:
    return completions.encode(
      tokenizer,
      read(path),
      reader=reader,
      stop=stop,
      prompt_length=prompt_length,
      response_length=response_length,
      name=pathlib.Path(path).name,
      **text,
    )

  paths = mixtures.paths(train, 'train')
  parts = [load(path) for path in paths]
  num_rows = [len(part.prompt) for part in parts]
  mixture = mixtures.Mixture(num_rows, mixtures.shares(train, num_rows))
  training = _joined(parts, reader)
  held_out_paths = mixtures.paths(held_out, 'held_out')
  held_out_parts = [load(path) for path in held_out_paths]
  found = (
    _recognized(paths, parts),
    _recognized(held_out_paths, held_out_parts),
  )
  evaluation = _joined(held_out_parts, reader)
  rooms = [reader.room(x.prompt) for x in (training, evaluation)]

  def advance(state, metrics):
    del metrics  # There is no curriculum.
    position, rows = mixtures.take(
      int(state['seed']), state['position'], mixture, batch_size
    )
    batch = np.asarray(state['batch'] + 1)
    state = {**state, 'batch': batch, 'position': position}
    return state, training.batch(rows, *lengths, rooms[0])

  def held_batches():
    rows = np.arange(len(evaluation.prompt))[:held_out_rows]
    n = min(held_out_batch, len(rows))
    starts = range(0, len(rows), n)
    sizes = *lengths, rooms[1]
    return [_filled(evaluation, rows[i : i + n], n, *sizes) for i in starts]

  return base.Source(
    mixtures.init(*found),
    advance,
    held_batches,
    lambda *rows: tokens.decode(tokenizer, *rows),
    check=source_files.checker(*found),
  )


def _recognized(
  paths: Sequence[str], parts: Sequence[completions.Encoded]
) -> source_files.Files:
  """Files of examples, with digests of them and of their pictures."""
  images = [[x for row in part.prompt for x in row.images] for part in parts]
  return files.recognized(paths, images)


def _stop(checkpoint: str) -> tuple[int, ...]:
  """Ids of the end tokens of a model; a policy stops at the same ones.

  Raises:
    ValueError: if it has none.
  """
  stop = stops.stop_tokens(checkpoint)
  if not stop:
    raise ValueError(
      f'{checkpoint} names no end token (eos_token_id) in its tokenizer, '
      'config.json or generation_config.json: add one.'
    )
  return stop


def _joined(
  parts: Sequence[completions.Encoded], reader: picture_files.Reader
) -> completions.Encoded:
  """The rows of several files, one after the other."""
  return completions.Encoded(
    [prompt for part in parts for prompt in part.prompt],
    [replies for part in parts for replies in part.completions],
    reader,
  )


def _filled(encoded: completions.Encoded, rows, n: int, *sizes) -> base.Example:
  """A batch of `n` rows, filled up with rows without completion tokens."""
  missing = n - len(rows)
  batch = encoded.batch(
    np.concatenate([rows, rows[:1].repeat(missing)]), *sizes
  )
  each = len(batch.mask) // n
  batch.mask[(n - missing) * each :] = 0.0
  return batch
