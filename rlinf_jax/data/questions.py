"""A source of questions from files of your own."""

from collections.abc import Mapping, Sequence
import functools
import pathlib

import numpy as np

from rlinf_jax.data import chat as chat_lib
from rlinf_jax.data import files, mixtures
from rlinf_jax.data import prompts as prompts_lib
from stages import base
from stages.language import tokens

WINDOW = 16  # Batches among which questions are sorted by length.


def questions(
  checkpoint: str,
  *,
  train: str | Sequence[str] | Mapping[str, float],
  held_out: str | Sequence[str],
  batch_size: int,
  prompt_length: int,
  held_out_batch: int = 256,
  held_out_rows: int | None = None,
  prompt_column: str | None = None,
  answer_column: str = 'answer',
  answer_after: str = '####',
  chat: bool = True,
  system_prompt: str | None = None,
  template: str = '{prompt}',
  drop_long: bool = False,
  buckets: Sequence[int] = (),
) -> base.Source:
  """A source of the questions in files, and their answers.

  Batch `i` is a function of the files, the seed and `i`. An epoch gives every
  question once, in an order that depends on the seed and the epoch.

  Args:
    checkpoint: folder of the model whose tokenizer to use.
    train: a file of questions, several, or `{file: weight}`: the share of each
      in every batch; by default, files have shares by their sizes.
    held_out: a file of questions for evaluation, or several.
    batch_size: questions a batch.
    prompt_length: the most tokens of a prompt.
    held_out_batch: held-out questions a batch.
    held_out_rows: number of held-out questions, the first; None for all.
    prompt_column: as `files.read`.
    answer_column: likewise.
    answer_after: likewise.
    chat: as `chat.texts`.
    system_prompt: likewise.
    template: likewise.
    drop_long: whether prompts over the limit are left out rather than refused.
    buckets: lengths in tokens to which prompts are padded, besides
      `prompt_length`. Batches are then made of prompts of similar length, and
      each is padded to the shortest of these that holds it. A step is compiled
      once for each; not with Ray.
  """
  tokenizer = tokens.load_tokenizer(checkpoint)
  lengths = _lengths(buckets, prompt_length)

  def load(path: str):
    rows = files.read(
      path,
      prompt_column=prompt_column,
      answer_column=answer_column,
      answer_after=answer_after,
    )
    texts = chat_lib.texts(
      tokenizer,
      rows,
      chat=chat,
      system_prompt=system_prompt,
      template=template,
    )
    return prompts_lib.encode(
      tokenizer,
      rows,
      texts,
      limit=prompt_length,
      drop_long=drop_long,
      name=pathlib.Path(path).name,
    )

  parts = [load(path) for path in mixtures.paths(train, 'train')]
  sizes = [len(rows) for rows, _ in parts]
  weights = mixtures.shares(train, sizes)
  train_prompts = _joined(parts)
  held = _joined([load(path) for path in mixtures.paths(held_out, 'held_out')])
  return base.Source(
    mixtures.init(len(sizes)),
    _next(train_prompts, sizes, weights, batch_size, lengths),
    _held_out(held, held_out_rows, held_out_batch, prompt_length),
    lambda *rows: tokens.decode(tokenizer, *rows),
  )


def _next(prompts, sizes, weights, batch_size: int, lengths: Sequence[int]):
  """Returns the function from a state to the next one and its batch."""
  # Alike only within a window, so that no length waits for long.
  window = WINDOW if len(lengths) > 1 else 1

  @functools.lru_cache(maxsize=4)
  def in_window(seed: int, number: int, position: tuple[int, ...]):
    position, rows = mixtures.take(
      seed, np.array(position), sizes, weights, window * batch_size
    )
    if window == 1:
      return position, rows[None]
    rng = np.random.default_rng([seed, len(sizes), number])
    return position, mixtures.batches_by_length(
      rng, rows, prompts.length, batch_size
    )

  def advance(state, metrics):
    del metrics  # There is no curriculum.
    number, index = divmod(int(state['batch']), window)
    position = tuple(state['position'].tolist())
    after, batches = in_window(int(state['seed']), number, position)
    rows = batches[index]
    length = next(n for n in lengths if n >= prompts.length[rows].max())
    state = {**state, 'batch': np.asarray(state['batch'] + 1)}
    if index == window - 1:
      state['position'] = after
    return state, prompts.batch(rows, length)

  return advance


def _held_out(prompts, limit: int | None, size: int, length: int):
  """Returns the function that makes the held-out batches.

  The last one is filled up with questions whose weight is zero.
  """

  def held():
    rows = np.arange(len(prompts.token))[:limit]
    n = min(size, len(rows))
    filled = -len(rows) % n
    weight = np.concatenate(
      [np.ones(len(rows), np.float32), np.zeros(filled, np.float32)]
    )
    rows = np.concatenate([rows, rows[:filled]])
    return [
      prompts.batch(rows[i : i + n], length)._replace(weight=weight[i : i + n])
      for i in range(0, len(rows), n)
    ]

  return held


def _joined(parts) -> prompts_lib.Prompts:
  """The questions of several files, one after the other."""
  rows = [row for rows, _ in parts for row in rows]
  return prompts_lib.prompts(rows, [t for _, encoded in parts for t in encoded])


def _lengths(buckets: Sequence[int], prompt_length: int) -> list[int]:
  """The lengths to which prompts are padded, the shortest first."""
  wrong = [n for n in buckets if not 0 < n <= prompt_length]
  if wrong:
    raise ValueError(
      f'The buckets {wrong} are not lengths between 1 and prompt_length = '
      f'{prompt_length}: leave them out, or raise prompt_length.'
    )
  return sorted({*buckets, prompt_length})
