"""Conversion between text and tokens, on the host."""

from collections.abc import Iterable, Sequence
import functools
import pathlib
import unicodedata
import zlib

import numpy as np

from stages import base

END = '<|endoftext|>'


@functools.cache
def load_tokenizer(checkpoint: str):
  """The tokenizer of a checkpoint's folder.

  Raises:
    ValueError: if there is none.
  """
  import transformers

  # Otherwise `transformers` would take it as the name of a model to download.
  if not pathlib.Path(checkpoint).is_dir():
    raise ValueError(
      f'There is no checkpoint at {checkpoint}: give the folder of a model in '
      'Hugging Face format.'
    )
  try:
    return transformers.AutoTokenizer.from_pretrained(checkpoint)
  except (OSError, ValueError) as error:
    raise ValueError(
      f'{checkpoint} holds no tokenizer that transformers can read: copy its '
      'tokenizer.json and tokenizer_config.json there.'
    ) from error


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


def encode_prompts(tokenizer, texts: Sequence[str], length: int) -> base.Prompt:
  """Encodes prompts, padded on the left to `length` tokens.

  Raises:
    ValueError: for a text without tokens, with more than `length`, or with
      characters that the tokenizer does not know.
  """
  rows = tokenizer(list(texts), add_special_tokens=False)['input_ids']
  for text, row in zip(texts, rows, strict=True):
    lost = lost_characters(tokenizer, text, row)
    if lost:
      raise ValueError(
        f'The prompt {text!r} has {sorted(lost)}, which this tokenizer cannot '
        'encode: remove these characters, or use another checkpoint.'
      )
    if not 0 < len(row) <= length:
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


def text_ids(texts: Sequence[str | None]) -> np.ndarray:
  """An id of each text, int32 [B]: its CRC-32 without the top bit; −1 of None.

  Equal texts have equal ids, and different ones almost always differ.
  """
  ids = [
    -1 if t is None else zlib.crc32(t.encode(errors='replace')) >> 1
    for t in texts
  ]
  return np.array(ids, np.int32)
