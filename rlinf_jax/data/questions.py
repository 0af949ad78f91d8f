"""A source of questions from files of your own."""

from collections.abc import Mapping, Sequence
import functools
import pathlib

import numpy as np

from rlinf_jax.data import files, mixtures, picture_files
from rlinf_jax.data import prompts as prompts_lib
from stages import base, ranges, source_files
from stages.language import tokens

WINDOW = 16  # Batches among which questions are sorted by length.


def questions(
  checkpoint: str,
  *,
  train: str | Sequence[str] | Mapping[str, float],
  held_out: str | Sequence[str] | Mapping[str, str],
  batch_size: ranges.PositiveInt,
  prompt_length: ranges.PositiveInt,
  held_out_batch: ranges.PositiveInt = 256,
  held_out_rows: ranges.PositiveInt | None = None,
  prompt_column: str | None = None,
  answer_column: str = 'answer',
  answer_after: str = '####',
  difficulty_column: str | None = None,
  columns: str | Sequence[str] = (),
  chat: bool = True,
  system_prompt: str | None = None,
  template: str = '{prompt}',
  opening: prompts_lib.Opening = prompts_lib.QUESTION,
  drop_long: bool = False,
  buckets: Sequence[int] = (),
  image_column: str | None = None,
  min_pixels: ranges.PositiveInt | None = None,
  max_pixels: ranges.PositiveInt | None = None,
) -> base.Source:
  """A source of the questions in files, and their answers.

  Batch `i` is a function of the files, the seed and `i`. An epoch gives every
  question once, in an order that depends on the seed and the epoch. With a
  `difficulty_column`, the first epoch goes from easy to hard (a curriculum).

  Args:
    checkpoint: folder of the model whose tokenizer to use.
    train: a file of questions, several, or `{file: weight}`: the share of each
      in every batch; by default, files have shares by their sizes.
    held_out: a file of questions for evaluation; or several, each a set with
      metrics of its own; or `{name of the set: file}`. Without names, those of
      the files are used.
    batch_size: questions a batch.
    prompt_length: the most tokens of a prompt.
    held_out_batch: held-out questions a batch.
    held_out_rows: number of questions of each set, the first; None for all.
    prompt_column: as `files.read`.
    answer_column: likewise.
    answer_after: likewise.
    difficulty_column: likewise, of the files to train on.
    columns: as `files.read`; rewards find them in `Completion.columns`.
    chat: as `chat.texts`.
    system_prompt: likewise.
    template: likewise.
    opening: how prompts are made of questions: by default, as the first message
      of a chat; `agents.problems.opening` lets a text environment begin.
    drop_long: whether prompts over the limit are left out rather than refused.
    buckets: lengths in tokens to which prompts are padded, besides
      `prompt_length`. Batches are then made of prompts of similar length, and
      each is padded to the shortest of these that holds it. A step is compiled
      once for each; not with Ray.
    image_column: as `files.read`.
    min_pixels: as `picture_files.reader`.
    max_pixels: likewise.
  """
  tokenizer = tokens.load_tokenizer(checkpoint)
  reader = picture_files.reader(checkpoint, min_pixels, max_pixels)
  lengths = _lengths(buckets, prompt_length)

  def load(path: str, difficulty: str | None = None):
    rows = files.read(
      path,
      prompt_column=prompt_column,
      answer_column=answer_column,
      answer_after=answer_after,
      difficulty_column=difficulty,
      image_column=image_column,
      columns=columns,
    )
    texts = opening.texts(
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
      reader=reader,
      limit=prompt_length,
      drop_long=drop_long,
      name=pathlib.Path(path).name,
      chat=chat,
    )

  paths = mixtures.paths(train, 'train')
  parts = [load(path, difficulty_column) for path in paths]
  own_files = _held_out_files(held_out)
  sets = {name: load(path) for name, path in own_files.items()}
  found = (
    _recognized(paths, parts),
    _recognized([*own_files.values()], sets.values()),
  )
  num_rows = [len(rows) for rows, _ in sets.values()]
  batches = _held_out_rows(num_rows, held_out_rows, held_out_batch)
  encoded = _joined(list(sets.values()), reader, opening)
  return base.Source(
    mixtures.init(*found),
    _next(
      _joined(parts, reader, opening),
      _mixture(train, parts),
      batch_size,
      lengths,
    ),
    lambda: [
      encoded.batch(rows, prompt_length)._replace(weight=weight)
      for _, rows, weight in batches
    ],
    lambda *rows: tokens.decode(tokenizer, *rows),
    (lambda: [list(sets)[i] for i, *_ in batches]) if len(sets) > 1 else None,
    source_files.checker(*found),
  )


def _recognized(paths: Sequence[str], parts) -> source_files.Files:
  """Files of questions, with digests of them and of their pictures."""
  images = [[x for row in rows for x in row.images] for rows, _ in parts]
  return files.recognized(paths, images)


def _mixture(train, parts) -> mixtures.Mixture:
  """The order of the questions of several files."""
  rows = [row for rows, _ in parts for row in rows]
  difficulty = None
  if rows and rows[0].difficulty is not None:
    difficulty = np.array([row.difficulty for row in rows])
  num_rows = [len(rows) for rows, _ in parts]
  return mixtures.Mixture(
    num_rows, mixtures.shares(train, num_rows), difficulty
  )


def _next(
  prompts, mixture: mixtures.Mixture, batch_size: int, lengths: Sequence[int]
):
  """Returns the function from a state to the next one and its batch."""
  # Alike only within a window, so that no length waits for long, and a question
  # seldom meets itself.
  window = 1
  if len(lengths) > 1:
    total = sum(mixture.weights)
    epochs = [  # Batches in an epoch of each file.
      n * total / (weight * batch_size)
      for n, weight in zip(mixture.sizes, mixture.weights, strict=True)
      if weight
    ]
    window = max(1, min(WINDOW, int(min(epochs))))

  @functools.lru_cache(maxsize=4)
  def in_window(seed: int, number: int, position: tuple[int, ...]):
    position, rows = mixtures.take(
      seed, np.array(position), mixture, window * batch_size
    )
    if window == 1:
      return position, rows[None]
    rng = np.random.default_rng([seed, len(mixture.sizes), number])
    return position, mixtures.batches_by_length(
      rng, rows, prompts.length, batch_size
    )

  def advance(state, metrics):
    del metrics  # The order is known beforehand.
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


def _held_out_rows(
  sizes: Sequence[int], limit: int | None, batch_size: int
) -> list[tuple[int, np.ndarray, np.ndarray]]:
  """The batches of held-out questions of several sets, one after the other.

  The last batch of a set is filled up with its questions, of weight zero.

  Args:
    sizes: number of questions of each set.
    limit: number of them to use, the first; None for all.
    batch_size: questions a batch; fewer if no set has as many.

  Returns:
    The set, the rows and the weights of each batch.
  """
  starts = np.cumsum([0, *sizes])
  used = [len(range(size)[:limit]) for size in sizes]
  n = min(batch_size, max(used))
  batches = []
  for i, (start, size) in enumerate(zip(starts, used, strict=False)):
    row = np.arange(-(-size // n) * n)
    weight = (row < size).astype(np.float32)
    row = start + row % size
    cuts = range(n, len(row), n)
    batches += [
      (i, *part)
      for part in zip(np.split(row, cuts), np.split(weight, cuts), strict=True)
    ]
  return batches


def _joined(
  parts, reader: picture_files.Reader, opening: prompts_lib.Opening
) -> prompts_lib.Prompts:
  """The questions of several files, one after the other."""
  rows = [row for rows, _ in parts for row in rows]
  encoded = [x for _, encoded in parts for x in encoded]
  return prompts_lib.prompts(rows, encoded, reader, opening)


def _held_out_files(given) -> dict[str, str]:
  """The file of each set of held-out questions, by the name of the set."""
  if isinstance(given, Mapping):
    files_of = dict(given)
  else:
    paths = mixtures.paths(given, 'held_out')
    files_of = {pathlib.Path(path).stem: path for path in paths}
    if len(files_of) < len(paths):
      raise ValueError(
        f'Files {paths} of held-out questions have the same names, by which '
        "their metrics would be logged: name the sets, as in {'name': 'file'}."
      )
  if not files_of:
    raise ValueError("No file is given for 'held_out' (EVAL in gin): name one.")
  wrong = [x for x in files_of if not x or '/' in x or x == 'all']
  if wrong and len(files_of) > 1:
    raise ValueError(
      f'The names {wrong} of held-out sets cannot be parts of the names of '
      'metrics: name them by at least one character, without slashes, and not '
      "'all', which is all sets together."
    )
  return files_of


def _lengths(buckets: Sequence[int], prompt_length: int) -> list[int]:
  """The lengths to which prompts are padded, the shortest first."""
  wrong = [n for n in buckets if not 0 < n <= prompt_length]
  if wrong:
    raise ValueError(
      f'The buckets {wrong} are not lengths between 1 and prompt_length = '
      f'{prompt_length}: leave them out, or raise prompt_length (BUCKETS and '
      'PROMPT in gin).'
    )
  return sorted({*buckets, prompt_length})
