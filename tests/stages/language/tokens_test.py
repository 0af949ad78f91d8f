import logging

import numpy as np
import pytest

import llama_tokenizer
from stages.language import tokens
from stages.tasks import arithmetic


@pytest.fixture(scope='module')
def tokenizer(tmp_path_factory):
  folder = tmp_path_factory.mktemp('tokenizer')
  texts = [*arithmetic.corpus(200), *['the cat and the hat'] * 9]
  return tokens.train_tokenizer(folder, texts, 80)


@pytest.fixture(scope='module')
def llama(tmp_path_factory):
  return llama_tokenizer.save(tmp_path_factory.mktemp('llama'))


def pieces(tokenizer, string):
  return tokenizer.convert_ids_to_tokens(tokenizer(string)['input_ids'])


def test_a_trained_tokenizer_can_be_loaded(tmp_path):
  trained = tokens.train_tokenizer(tmp_path, arithmetic.corpus(200), 80)
  again = tokens.load_tokenizer(str(tmp_path))
  assert again.get_vocab() == trained.get_vocab()
  assert again.eos_token_id == again.pad_token_id == trained.eos_token_id
  for string in arithmetic.corpus(20):
    assert again(string)['input_ids'] == trained(string)['input_ids']


def test_the_type_of_a_model_that_transformers_lacks_is_no_warning(tmp_path):
  tokens.train_tokenizer(tmp_path, ['a'], size=8)
  (tmp_path / 'config.json').write_text('{"model_type": "openvla"}')
  records = []
  handler = logging.Handler()
  handler.emit = records.append
  logger = logging.getLogger('transformers')
  logger.addHandler(handler)
  try:
    tokens.load_tokenizer(str(tmp_path))
  finally:
    logger.removeHandler(handler)
  assert [x.getMessage() for x in records] == []


def test_texts_survive_the_round_trip(tokenizer):
  texts = [*arithmetic.corpus(300), 'the hat', 'cat and 12']
  for make in tokens.encode_prompts, tokens.encode_completions:
    rows = make(tokenizer, texts, 120)
    assert tokens.decode(tokenizer, *rows) == texts


def test_every_digit_is_a_token_and_words_are_merged(tokenizer):
  assert pieces(tokenizer, '120+345=') == [*'120+345=']
  assert len(pieces(tokenizer, 'the cat')) < len('the cat') / 2


def test_the_vocabulary_is_no_larger_than_asked(tmp_path):
  texts = ['some words, and other words, and more words'] * 9
  for size in 20, 30:
    assert len(tokens.train_tokenizer(tmp_path, texts, size)) == size


def test_unknown_characters_are_refused(tokenizer):
  with pytest.raises(ValueError, match=r"'12 plus Ω=' has \[.*'Ω'\]"):
    tokens.encode_prompts(tokenizer, ['12+3=', '12 plus Ω='], 9)


def test_prompts_are_padded_on_the_left(tokenizer):
  token, mask = tokens.encode_prompts(tokenizer, ['12+345=', '7+8='], 9)
  ids = [tokenizer('12+345=')['input_ids'], tokenizer('7+8=')['input_ids']]
  np.testing.assert_array_equal(token[0, 2:], ids[0])
  np.testing.assert_array_equal(token[1, 5:], ids[1])
  np.testing.assert_array_equal(mask.sum(1), [7, 4])
  np.testing.assert_array_equal(mask, np.sort(mask))


def test_completions_end_and_are_padded_on_the_right(tokenizer):
  action, mask = tokens.encode_completions(tokenizer, ['405', ''], 6)
  end = tokenizer.eos_token_id
  np.testing.assert_array_equal(
    action[0, :4], [*tokenizer('405')['input_ids'], end]
  )
  assert action[1, 0] == end
  np.testing.assert_array_equal(mask, [[1, 1, 1, 1, 0, 0], [1, 0, 0, 0, 0, 0]])
  assert mask.dtype == np.float32


def test_padding_is_not_read(tokenizer):
  action, mask = tokens.encode_completions(tokenizer, ['12', '345'], 8)
  junk = np.where(mask > 0, action, tokenizer('9')['input_ids'][0])
  assert tokens.decode(tokenizer, junk, mask) == ['12', '345']
  assert tokens.decode(tokenizer, junk, 0 * mask) == ['', '']


def test_a_prompt_that_is_too_long_is_a_sentence(tokenizer):
  tokens.encode_prompts(tokenizer, ['12+345='], 7)
  with pytest.raises(
    ValueError,
    match=r"The prompt '12\+345=' has 7 tokens and the limit is 6: raise",
  ):
    tokens.encode_prompts(tokenizer, ['1+2=', '12+345='], 6)
  with pytest.raises(ValueError, match="The prompt '' has 0 tokens"):
    tokens.encode_prompts(tokenizer, [''], 6)


def test_an_example_that_is_too_long_is_a_sentence(tokenizer):
  tokens.encode_completions(tokenizer, ['12345'], 6)
  with pytest.raises(
    ValueError, match="The example '12345' has 6 tokens and the limit is 5"
  ):
    tokens.encode_completions(tokenizer, ['1', '12345'], 5)


def test_no_tokenizer_is_a_sentence(tmp_path):
  with pytest.raises(ValueError, match='There is no checkpoint at .*nowhere'):
    tokens.load_tokenizer(str(tmp_path / 'nowhere'))
  with pytest.raises(ValueError, match='There is no checkpoint at some/model'):
    tokens.load_tokenizer('some/model')
  with pytest.raises(ValueError, match='has no tokenizer.json: copy it'):
    tokens.load_tokenizer(str(tmp_path))


TEXTS = (
  '4',
  ' 4',
  'the answer is 5',
  ' the answer',
  '\nand 3',
  '.',
  '  two',
  '=a',
)


@pytest.mark.parametrize('text', TEXTS)
def test_a_text_behind_another_gains_no_space(text, llama):
  before = llama('the cat', add_special_tokens=False)['input_ids']
  row = [*before, *tokens.continue_with(llama, text)]
  assert llama.decode(row) == f'the cat{text}'


def test_a_text_is_the_same_behind_another_where_none_gains_a_space(tokenizer):
  for text in 'the hat', ' cat', '12+3=':
    want = tokenizer(text, add_special_tokens=False)['input_ids']
    assert tokens.continue_with(tokenizer, text) == want


def test_a_continuation_is_what_the_whole_text_has_behind_the_prompt(llama):
  encode = lambda text: llama(text, add_special_tokens=False)['input_ids']
  for prompt, text in ('2+2=', '4'), ('what is the sum?', ' 5.'):
    whole = encode(prompt + text)
    assert [*encode(prompt), *tokens.continue_with(llama, text)] == whole
  assert [*encode('2+2='), *encode('4')] != encode('2+2=4')


def test_a_prompt_without_a_template_begins_as_transformers_begins_texts(llama):
  texts = ['what is 2 and 3?', '2+2=']
  want = llama(texts)['input_ids']
  got = tokens.encode_prompts(llama, texts, 20, templated=False)
  for row, keep, ids in zip(*got, want, strict=True):
    assert row[keep > 0].tolist() == ids
  assert tokens.first_tokens(llama) == (llama.bos_token_id,)
  plain = tokens.encode_prompts(llama, texts, 20)
  assert (plain.mask.sum(1) == got.mask.sum(1) - 1).all()
  with pytest.raises(ValueError, match='has 1 tokens'):
    tokens.encode_prompts(llama, [''], 20, templated=False)


def test_a_tokenizer_without_a_start_adds_none(tokenizer):
  assert tokens.first_tokens(tokenizer) == ()
