"""Texts that end the completions of a checkpoint."""

import functools

import jax
import numpy as np
import pytest

import llama_tokenizer
import own_data
from stages.language import huggingface, stops, tokens

PROMPT, LENGTH, ROWS = ['what is 1?'], 24, 8


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  return own_data.model(tmp_path_factory.mktemp('model'))


def of_bytes():
  """A tokenizer whose tokens are the 256 bytes, and some words."""
  import tokenizers
  from tokenizers import decoders, models, pre_tokenizers, trainers
  import transformers

  model = tokenizers.Tokenizer(models.BPE())
  model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  model.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=270,
    special_tokens=['<end>'],
    show_progress=False,
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
  )
  model.train_from_iterator(['so it is, é 日本'] * 20, trainer)
  return transformers.PreTrainedTokenizerFast(
    tokenizer_object=model, eos_token='<end>'
  )


@pytest.mark.parametrize('kind', ['bytes', 'llama'])
def test_texts_are_the_bytes_of_their_tokens(kind, tmp_path):
  tokenizer = of_bytes() if kind == 'bytes' else llama_tokenizer.save(tmp_path)
  size = len(tokenizer)
  bytes_V = stops.token_bytes(tokenizer, size + 3)
  assert bytes_V[size:] == [None] * 3
  assert bytes_V[tokenizer.eos_token_id] is None
  rng = np.random.default_rng(0)
  start = tokenizer('a', add_special_tokens=False)['input_ids']
  for _ in range(50):
    ids = rng.integers(0, size, 20).tolist()
    said = b''.join(bytes_V[i] or b'' for i in ids)
    text = tokenizer.decode([*start, *ids], skip_special_tokens=True)
    assert text == 'a' + said.decode(errors='replace')


def test_a_policy_ends_its_turns_at_a_text(folder):
  tokenizer = tokens.load_tokenizer(folder)
  prompt = tokens.encode_prompts(tokenizer, PROMPT * ROWS, 12)
  keys = jax.random.split(jax.random.key(0), ROWS)

  def texts(**settings):
    policy = huggingface.policy(folder, response_length=LENGTH, **settings)
    act = jax.jit(functools.partial(policy.act, group_size=ROWS))
    x = jax.device_get(act(policy.init(keys[0]), prompt, keys))
    return x, tokens.decode(tokenizer, x.action, x.mask)

  _, whole = texts()
  longest = max(whole, key=len)
  stop = longest[5:8]
  assert len(stop) == 3
  x, found = texts(stop_texts=stop)
  assert found[whole.index(longest)].endswith(stop)
  for row, (before, now) in enumerate(zip(whole, found, strict=True)):
    # The token in which the text ends may go on.
    assert before.startswith(now) and (stop in now) == (stop in before)
    assert not (stop in now and x.truncated[row])
  assert sum(map(len, found)) < sum(map(len, whole))


def test_texts_that_cannot_be_found_are_refused(folder):
  policy = functools.partial(huggingface.policy, folder, response_length=9)
  with pytest.raises(ValueError, match="at the text '日', .* cannot write"):
    policy(stop_texts='日')
  with pytest.raises(
    ValueError, match="at the text '', .* write a token: give"
  ):
    policy(stop_texts=('a', ''))


def test_bytes_that_are_no_characters_are_known_or_refused():
  assert stops._bytes_of_piece('<0xE6>') == b'\xe6'
  assert stops._bytes_of_piece('Ġ') == b' '
  assert stops._bytes_of_piece('日') is None
