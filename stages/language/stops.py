"""End tokens and texts that end the completions of a checkpoint."""

from collections.abc import Sequence
import functools
import pathlib
import re

from stages.language import tokens
from stages.language.decoding import stop_texts
from stages.models.files import config_check, weights
from stages.models.vision import vision_files

# Files of which a tokenizer has at least one.
TOKENIZERS = (
  'tokenizer.json',
  'tokenizer_config.json',
  'tokenizer.model',
  'vocab.json',
)
UNKNOWN = '\ufffd'  # Stands for bytes that are no character by themselves.
# A token is decoded after one of these texts: alone, it may lose a space.
ANCHORS = 'a', '1', '\n'


def stop_tokens(checkpoint: str | pathlib.Path) -> tuple[int, ...]:
  """Ids of end tokens, that of the tokenizer first.

  The others are those of generation_config.json, or else of config.json. vLLM
  stops at all of these, too. A folder without a tokenizer has only the latter.

  Raises:
    ValueError: if the model has no such tokens, or the tokenizer has others.
  """
  folder, ids, size = pathlib.Path(checkpoint), None, None
  for name in ('config.json', 'generation_config.json'):
    path = folder / name
    if not path.is_file():
      continue
    raw = weights.read_json(path)
    if isinstance(raw, dict):
      raw = vision_files.of_text(raw)
    config_check.check_end_tokens(raw, path, size)
    ids, size = raw.get('eos_token_id', ids), raw.get('vocab_size', size)
  ids = ids if isinstance(ids, list) else [] if ids is None else [ids]
  if any((folder / name).is_file() for name in TOKENIZERS):
    tokenizer = tokens.load_tokenizer(str(checkpoint))
    if size is not None:
      tokens.check_vocabulary(tokenizer, size, checkpoint)
    ids = [tokenizer.eos_token_id, *ids]
  return tuple(x for x in dict.fromkeys(ids) if x is not None)


def automaton(
  checkpoint: str, texts: str | Sequence[str], size: int
) -> stop_texts.StopTexts | None:
  """The automaton that finds texts in the tokens of a checkpoint.

  Args:
    checkpoint: folder of the model.
    texts: a text that ends completions, or several.
    size: of the model's vocabulary.

  Returns:
    The automaton; None if there are no texts.

  Raises:
    ValueError: for an empty text, or one that the tokenizer cannot write.
  """
  texts = (texts,) if isinstance(texts, str) else tuple(texts)
  if not texts:
    return None
  tokenizer = tokens.load_tokenizer(checkpoint)
  for text in texts:
    ids = tokenizer(text, add_special_tokens=False)['input_ids'] if text else []
    lost = tokens.lost_characters(tokenizer, text, ids)
    if lost or not ids:
      raise ValueError(
        f'Completions are to end at the text {text!r}, of which the tokenizer '
        f'of {checkpoint} cannot write {sorted(lost) or "a token"}: give '
        'another text in stop_texts (STOP in gin), or leave it out.'
      )
  return _automaton(tokenizer, texts, size)


@functools.lru_cache(maxsize=8)
def _automaton(tokenizer, texts: tuple[str, ...], size: int):
  return stop_texts.make(texts, token_bytes(tokenizer, size))


def token_bytes(tokenizer, size: int) -> list[bytes | None]:
  """The bytes that each token adds to a text.

  Args:
    tokenizer: the tokenizer.
    size: tokens of the model, of which the tokenizer may lack the last.

  Returns:
    Bytes by id; None for tokens that add none, such as special ones.

  Raises:
    ValueError: for a tokenizer that writes a token, of bytes that are no
      character, in an unknown way.
  """
  decode = functools.partial(
    tokenizer.batch_decode,
    skip_special_tokens=True,
    clean_up_tokenization_spaces=False,
  )
  before = _anchor(tokenizer)
  (start,) = decode([before])
  ids = range(min(size, len(tokenizer)))
  texts = decode([[*before, x] for x in ids])
  pieces = tokenizer.convert_ids_to_tokens(list(ids))
  found: list[bytes | None] = [None] * size
  for i, text, piece in zip(ids, texts, pieces, strict=True):
    added = text[len(start) :]
    if piece is None or not added:
      continue
    is_whole = UNKNOWN not in added
    found[i] = added.encode() if is_whole else _bytes_of_piece(piece)
    if found[i] is None:
      raise ValueError(
        f'The tokenizer of {tokenizer.name_or_path} writes token {i} as '
        f'{piece!r}, which is no character, and its bytes are not known, so '
        'that completions cannot end at texts: leave out stop_texts (STOP in '
        'gin).'
      )
  return found


def _anchor(tokenizer) -> list[int]:
  """Tokens of a text to which others are added; none if it knows none."""
  for text in ANCHORS:
    ids = tokenizer(text, add_special_tokens=False)['input_ids']
    if ids and tokenizer.decode(ids).strip(' ') == text:
      return ids
  return []


def _bytes_of_piece(piece: str) -> bytes | None:
  """The bytes of a token that is no character, by its entry in a vocabulary."""
  if byte := re.fullmatch('<0x([0-9A-F]{2})>', piece):
    return bytes.fromhex(byte[1])
  letters = tokens.byte_of_letter()
  if all(x in letters for x in piece):
    return bytes(letters[x] for x in piece)
  return UNKNOWN.encode() if UNKNOWN in piece else None
