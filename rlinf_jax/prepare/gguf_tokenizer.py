"""Tokenizers of GGUF files, as `transformers` reads them from a folder."""

from collections.abc import Mapping
import pathlib
from typing import Any

from stages.models.files import weights

CONTROL, USER_DEFINED = 3, 4  # Types of tokens that text is not merged into.
LLAMA_3 = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
  r'| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+'
)
QWEN_2 = LLAMA_3.replace(r'\p{N}{1,3}', r'\p{N}')
# The regular expression that splits text before bytes are merged, by
# `tokenizer.ggml.pre`; None for that of GPT-2, which `tokenizers` has.
SPLITS = {'gpt-2': None, 'smollm': None, 'llama-bpe': LLAMA_3, 'qwen2': QWEN_2}


def write(
  folder: str | pathlib.Path, fields: Mapping[str, Any], source: Any
) -> None:
  """Writes the tokenizer that the fields of a GGUF file describe.

  Args:
    folder: where to write.
    fields: the file's metadata by key.
    source: the file, for errors.

  Raises:
    CheckpointError: for a tokenizer other than byte-level BPE, or one that
      splits text in an unknown way.
  """
  import transformers

  kind = fields.get('tokenizer.ggml.model')
  if kind != 'gpt2':
    raise weights.CheckpointError(
      f'{source} has a tokenizer of type {kind!r}; byte-level BPE (gpt2) is '
      'supported.'
    )
  names = fields['tokenizer.ggml.tokens']

  def token(name):
    number = fields.get(f'tokenizer.ggml.{name}_token_id')
    return None if number is None else names[number]

  fast = transformers.PreTrainedTokenizerFast(
    tokenizer_object=_tokenizer(fields, source),
    bos_token=token('bos'),
    eos_token=token('eos'),
    unk_token=token('unknown'),
    pad_token=token('padding') or token('eos'),
    clean_up_tokenization_spaces=False,
  )
  fast.chat_template = fields.get('tokenizer.chat_template')
  fast.save_pretrained(folder)


def _tokenizer(fields, source):
  """The tokenizer without names of special tokens."""
  import tokenizers
  from tokenizers import decoders, models, normalizers, pre_tokenizers

  split = fields.get('tokenizer.ggml.pre', 'gpt-2')
  if split not in SPLITS:
    raise weights.CheckpointError(
      f'{source} has a tokenizer that splits text as {split!r}; '
      f'{", ".join(SPLITS)} are supported.'
    )
  names = fields['tokenizer.ggml.tokens']
  merges = [tuple(x.split(' ')) for x in fields['tokenizer.ggml.merges']]
  found = tokenizers.Tokenizer(
    models.BPE(
      {name: i for i, name in enumerate(names)},
      merges,
      ignore_merges=split == 'llama-bpe',
    )
  )
  regex = SPLITS[split]
  steps = [pre_tokenizers.ByteLevel(False, use_regex=regex is None)]
  if split == 'smollm':
    steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
  if regex:
    pattern = tokenizers.Regex(regex)
    steps.insert(0, pre_tokenizers.Split(pattern, 'isolated'))
  found.pre_tokenizer = pre_tokenizers.Sequence(steps)
  if split == 'qwen2':
    found.normalizer = normalizers.NFC()
  found.decoder = decoders.ByteLevel()
  kinds = fields['tokenizer.ggml.token_type']
  for wanted, add in (
    (CONTROL, found.add_special_tokens),
    (USER_DEFINED, found.add_tokens),
  ):
    add(
      [
        tokenizers.AddedToken(name, normalized=False)
        for name, kind in zip(names, kinds, strict=True)
        if kind == wanted
      ]
    )
  return found
