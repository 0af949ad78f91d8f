"""Conversion between text and tokens, on the host."""

from collections.abc import Iterable, Iterator, Sequence
import contextlib
import functools
import logging
import pathlib
import unicodedata
import zlib

import numpy as np

from stages import base
from stages.models.files import weights

END = '<|endoftext|>'


# Files of which one group holds the vocabulary of a tokenizer.
VOCABULARIES = (
  ('tokenizer.json',),
  ('tokenizer.model',),
  ('vocab.json', 'merges.txt'),
)
MOST_BYTES = 2**28  # Of a file of a tokenizer.


@functools.cache
def load_tokenizer(checkpoint: str):
  """The tokenizer of a checkpoint's folder; no code in the folder is run.

  Raises:
    ValueError: if there is none, or it cannot be read.
  """
  import transformers

  # Otherwise `transformers` would take it as the name of a model to download.
  folder = pathlib.Path(checkpoint)
  if not folder.is_dir():
    raise ValueError(
      f'There is no checkpoint at {checkpoint}. '
      f'{weights.where_to_get(checkpoint)}'
    )
  # Without it, `transformers` makes a tokenizer of one token.
  groups = [[folder / name for name in group] for group in VOCABULARIES]
  found = [x for x in groups if all(path.is_file() for path in x)]
  if not found:
    raise ValueError(
      f'{checkpoint} has no tokenizer.json: copy it there, with '
      'tokenizer_config.json, from where the model was published.'
    )
  if any(x.stat().st_size > MOST_BYTES for group in found for x in group):
    raise ValueError(
      f'The vocabulary in {checkpoint} has more than {MOST_BYTES} bytes: do '
      'not trust this checkpoint.'
    )
  try:
    with _of_an_unknown_model():
      return transformers.AutoTokenizer.from_pretrained(
        checkpoint, local_files_only=True, trust_remote_code=False
      )
  except BaseException as error:
    # A panic of the library in Rust is no Exception.
    if not isinstance(error, Exception) and 'Panic' not in type(error).__name__:
      raise
    raise ValueError(
      f'{checkpoint} holds no tokenizer that transformers can read '
      f'({error!r:.200}): copy its config.json, tokenizer.json and '
      'tokenizer_config.json again.'
    ) from error


@contextlib.contextmanager
def _of_an_unknown_model() -> Iterator[None]:
  """Silences the warning of `transformers` that it lacks a model's type.

  It looks for one beside every tokenizer. That of OpenVLA is read here alone.
  """
  logger = logging.getLogger('transformers.configuration_utils')
  before = logger.level
  logger.setLevel(logging.ERROR)
  try:
    yield
  finally:
    logger.setLevel(before)


def check_vocabulary(tokenizer, size: int, checkpoint) -> None:
  """Checks that a model has an embedding for each token.

  Tokens that were added to the vocabulary may lie beyond the model, as those of
  images do in Gemma 3; the end token may not.

  Args:
    tokenizer: of the checkpoint.
    size: of the model's vocabulary.
    checkpoint: the folder, for the error.

  Raises:
    ValueError: if it has tokens that the model lacks.
  """
  added = tokenizer.added_tokens_decoder
  ids = [x for x in tokenizer.get_vocab().values() if x not in added]
  end = tokenizer.eos_token_id
  if not ids:
    raise ValueError(
      f'The tokenizer of {checkpoint} has no tokens of text: copy its '
      'tokenizer.json again.'
    )
  largest = max([*ids, 0 if end is None else end])
  if largest >= size:
    raise ValueError(
      f'The tokenizer of {checkpoint} has a token {largest}, and the model has '
      f'{size} tokens from 0: copy the tokenizer.json that was published with '
      'the model.'
    )


def train_tokenizer(
  folder: str | pathlib.Path, texts: Iterable[str], size: int
):
  """Trains a BPE tokenizer like that of Qwen2, with one token a digit.

  Its vocabulary has the characters of `texts` only; `encode_prompts` refuses
  others. Starting from all 256 bytes would make it five times as large.

  Args:
    folder: folder to save it in.
    texts: texts that it must be able to encode.
    size: maximum vocabulary size; merges fill what characters leave.

  Returns:
    The tokenizer.
  """
  import tokenizers
  from tokenizers import decoders, models, pre_tokenizers, trainers
  import transformers

  model = tokenizers.Tokenizer(models.BPE())
  model.pre_tokenizer = pre_tokenizers.Sequence(
    [
      pre_tokenizers.Digits(individual_digits=True),
      pre_tokenizers.ByteLevel(add_prefix_space=False),
    ]
  )
  model.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=size, special_tokens=[END], show_progress=False
  )
  model.train_from_iterator(texts, trainer)
  tokenizer = transformers.PreTrainedTokenizerFast(
    tokenizer_object=model, eos_token=END, pad_token=END
  )
  tokenizer.save_pretrained(folder)
  return tokenizer


@functools.lru_cache(maxsize=16)
def first_tokens(tokenizer) -> tuple[int, ...]:
  """The tokens that a tokenizer puts before a text: BOS, if it has one.

  Chat templates write these themselves. Base models read them before a text;
  those of Llama and of Gemma know no text without.
  """
  whole = tokenizer('a')['input_ids']
  row = tokenizer('a', add_special_tokens=False)['input_ids']
  for i in range(len(whole) - len(row) + 1):
    if whole[i : i + len(row)] == row:
      return tuple(whole[:i])
  return ()


# Texts that BPE rarely merges with what follows. `continue_with` encodes one of
# them with the text behind it, and drops its tokens.
ANCHORS = '\n', '=', 'a'


def continue_with(tokenizer, text: str) -> list[int]:
  """Tokens of a text that stands behind another one.

  Tokenizers like Llama 2's begin each text that they encode with a space, which
  has no place within a text.
  """
  encode = functools.partial(tokenizer, add_special_tokens=False)
  if _begins_with_space(tokenizer):
    for anchor in ANCHORS:
      before = encode(anchor)['input_ids']
      row = encode(anchor + text)['input_ids']
      if row[: len(before)] == before:
        return row[len(before) :]
  return encode(text)['input_ids']


@functools.lru_cache(maxsize=16)
def _begins_with_space(tokenizer) -> bool:
  row = tokenizer('a', add_special_tokens=False)['input_ids']
  return tokenizer.decode([*row, *row]) != 'aa'


def encode_prompts(
  tokenizer, texts: Sequence[str], length: int, *, templated: bool = True
) -> base.Prompt:
  """Encodes prompts, padded on the left to `length` tokens.

  Args:
    tokenizer: of the model.
    texts: prompts.
    length: the most tokens of a prompt.
    templated: whether a chat template wrote them, which contain BOS already.
      Other prompts get it, see `first_tokens`.

  Raises:
    ValueError: for a text without tokens, with more than `length`, or with
      characters that the tokenizer does not know.
  """
  rows = tokenizer(list(texts), add_special_tokens=False)['input_ids']
  start = [] if templated else [*first_tokens(tokenizer)]
  rows = [[*start, *row] for row in rows]
  for text, row in zip(texts, rows, strict=True):
    lost = lost_characters(tokenizer, text, row)
    if lost:
      raise ValueError(
        f'The prompt {text!r} has {sorted(lost)}, which this tokenizer cannot '
        'encode: remove these characters, or use another checkpoint.'
      )
    if not len(start) < len(row) <= length:
      raise ValueError(
        f'The prompt {text!r} has {len(row)} tokens and the limit is {length}: '
        'raise prompt_length, or leave out such prompts.'
      )
  return pad_left(rows, length)


def pad_left(rows: Sequence[Sequence[int]], length: int) -> base.Prompt:
  """Tokens of prompts, padded on the left to `length`."""
  token_BP = np.zeros((len(rows), length), np.int32)
  mask_BP = np.zeros((len(rows), length), np.int32)
  for i, row in enumerate(rows):
    token_BP[i, length - len(row) :] = row
    mask_BP[i, length - len(row) :] = 1
  return base.Prompt(token_BP, mask_BP)


def lost_characters(tokenizer, text: str, row: Sequence[int]) -> set[str]:
  """The characters of a text that its tokens `row` lack.

  A tokenizer without an unknown token drops unknown characters silently.
  """
  return _characters(text) - _characters(tokenizer.decode(row))


def _characters(text: str) -> set[str]:
  return set(unicodedata.normalize('NFKC', text)) - {' '}


def encode_completions(tokenizer, texts: Sequence[str], length: int):
  """Encodes completions with an end token, padded on the right to `length`.

  Returns:
    Tokens [B, T], and a mask that is 1 on the text and on its end token.
  """
  rows = tokenizer(list(texts), add_special_tokens=False)['input_ids']
  action_BT = np.zeros((len(rows), length), np.int32)
  mask_BT = np.zeros((len(rows), length), np.float32)
  for i, row in enumerate(rows):
    row = [*row, tokenizer.eos_token_id]
    if len(row) > length:
      raise ValueError(
        f'The example {texts[i]!r} has {len(row)} tokens and the limit is '
        f'{length}: raise response_length.'
      )
    action_BT[i, : len(row)] = row
    mask_BT[i, : len(row)] = 1.0
  return action_BT, mask_BT


def decode(tokenizer, token_BT, mask_BT) -> list[str]:
  """The text of every row, without its end token."""
  rows = [
    row[keep > 0].tolist() for row, keep in zip(token_BT, mask_BT, strict=True)
  ]
  return tokenizer.batch_decode(rows, skip_special_tokens=True)


def through_last(mask_BT: np.ndarray) -> np.ndarray:
  """1 through the last 1 of each row: also on what is between the 1s.

  Of a conversation, the mask of the policy's own tokens becomes that of all
  tokens that it has written or read.
  """
  return np.maximum.accumulate(np.asarray(mask_BT)[:, ::-1], axis=1)[:, ::-1]


@functools.cache
def byte_of_letter() -> dict[str, int]:
  """The bytes of the letters that stand for them in vocabularies like GPT-2's.

  Those that can be printed stand for themselves, the others follow at 256.
  """
  printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
  others = [x for x in range(256) if x not in printed]
  letters = {chr(x): x for x in printed}
  return letters | {chr(256 + i): x for i, x in enumerate(others)}


def text_ids(texts: Sequence[str | None]) -> np.ndarray:
  """An id of each text, int32 [B]: its CRC-32 without the top bit; −1 of None.

  Equal texts have equal ids, and different ones almost always differ.
  """
  ids = [
    -1 if t is None else zlib.crc32(t.encode(errors='replace')) >> 1
    for t in texts
  ]
  return np.array(ids, np.int32)
