"""Texts and bytes of tokens in replies."""

import pytest

import llama_tokenizer
from rlinf_jax.agents import replies
from stages.language import tokens


def told(tokenizer, text, start=0):
  """Tokens of a text, as the log-probabilities of a reply tell them."""
  ids = tokenizer(text, add_special_tokens=False)['input_ids']
  rows = replies.logprobs(tokenizer, ids, [0.0] * len(ids), start)['content']
  return [(x['token'], bytes(x['bytes'])) for x in rows]


def test_bytes_of_tokens_that_are_parts_of_characters_make_the_text(tmp_path):
  text = 'n\u00e9 \u2713'
  # As many tokens as there are letters of bytes, so that none is merged.
  tokenizer = tokens.train_tokenizer(tmp_path, [text], 8)
  parts = told(tokenizer, text)
  assert len(parts) == len(text.encode()) == 7
  assert b''.join(data for _, data in parts) == text.encode()
  assert told(tokenizer, text, 5) == parts[5:]


def test_bytes_of_a_vocabulary_that_falls_back_to_bytes_make_the_text(tmp_path):
  import tokenizers
  from tokenizers import decoders, models
  import transformers

  pieces = ['<unk>', '\u2581', 'a', *[f'<0x{x:02X}>' for x in range(256)]]
  vocabulary = {piece: i for i, piece in enumerate(pieces)}
  model = tokenizers.Tokenizer(
    models.BPE(vocabulary, [], unk_token='<unk>', byte_fallback=True)
  )
  model.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
  tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=model)
  parts = told(tokenizer, 'a\u00e9')
  assert [data for _, data in parts] == [b'a', b'\xc3', b'\xa9']


@pytest.mark.parametrize('text', ['the answer is 5 .', 'a'])
def test_spaces_that_a_tokenizer_drops_at_a_beginning_are_told(tmp_path, text):
  tokenizer = llama_tokenizer.save(tmp_path)
  assert ''.join(token for token, _ in told(tokenizer, text)) == text
