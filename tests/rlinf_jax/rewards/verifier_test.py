import asyncio
import functools
import math
import time

import jax
import numpy as np
import pytest

import rewards_of_mine
from rlinf_jax.data import text_arrays
from rlinf_jax.rewards import base, functions, pool, verifier
from stages.language import tokens


@pytest.fixture(scope='module')
def model(tmp_path_factory):
  folder = tmp_path_factory.mktemp('model')
  printable = ''.join(map(chr, range(32, 127)))
  tokens.train_tokenizer(folder, [printable] * 2, 99)
  return str(folder)


def judge(model, texts, answer='2', width=24, **settings):
  stage = verifier.verify(model, **settings)
  tokenizer = tokens.load_tokenizer(model)
  packed = text_arrays.pack([answer] * len(texts))
  reference = text_arrays.Reference(packed, packed)
  rows = tokens.encode_completions(tokenizer, texts, width)
  shapes = stage.shapes(reference, *rows)
  verdict = stage(reference, *rows)
  assert jax.tree.structure(shapes) == jax.tree.structure(verdict)
  return verdict


def answers_two(completion: base.Completion) -> float:
  return float(completion.text.endswith('2'))


def length(completion: base.Completion) -> float:
  return completion.tokens


def broken(completion: base.Completion) -> float:
  return 1 / len(completion.text)


def test_the_default_rewards_right_final_answers(model):
  verdict = judge(model, ['\\boxed{2}', '\\boxed{3}', 'so 1+1=2', ''])
  assert verdict.reward.tolist() == verdict.correct.tolist() == [1, 0, 1, 0]
  assert verdict.terms['failed'].tolist() == [0, 0, 0, 0]


def test_rewards_add_up_by_weights_and_are_logged_apart(model):
  verdict = judge(
    model,
    ['2', '1', 'aa2'],
    rewards=[answers_two, length],
    weights=[1.0, -0.25],
  )
  assert verdict.terms['answers_two'].tolist() == [1, 0, 1]
  assert verdict.terms['length'].tolist() == [2, 2, 4]  # With the end token.
  assert verdict.reward.tolist() == [0.5, -0.5, 0]
  assert verdict.correct.tolist() == [1, 0, 1]


def test_a_function_that_raises_costs_its_own_term(model, capsys):
  verdict = judge(model, ['12', ''], rewards=[answers_two, broken])
  assert verdict.reward.tolist() == [1.5, 0]
  assert verdict.terms['failed'].tolist() == [0, 1]
  assert 'broken failed on a completion' in capsys.readouterr().out


@pytest.mark.parametrize(
  'value, why',
  [
    (None, 'it returned NoneType, and a number is expected'),
    ([1.0, 2.0], 'it returned list, and a number is expected'),
    (math.nan, 'it returned nan, and a finite number is expected'),
    (-math.inf, 'it returned -inf, and a finite number is expected'),
  ],
)
def test_what_is_no_number_is_reported(model, capsys, value, why):
  def mine(completion):
    return value

  verdict = judge(model, ['12'], rewards=[answers_two, mine])
  assert verdict.reward.tolist() == [1]
  assert verdict.terms['failed'].tolist() == [1]
  assert why in capsys.readouterr().out


async def asks(completion: base.Completion) -> float:
  await asyncio.sleep(0.2)
  return 1 / len(completion.text)


def test_calls_of_an_async_function_wait_at_the_same_time(model, capsys):
  start = time.monotonic()
  texts = ['', *['12'] * 31]
  partial = functools.partial(asks)
  verdict = judge(model, texts, rewards=[answers_two, partial])
  assert time.monotonic() - start < 0.2 * len(texts) / 2
  assert verdict.terms['asks'].tolist() == [0, *[0.5] * 31]
  assert verdict.terms['failed'].tolist() == [1, *[0] * 31]
  assert 'ZeroDivisionError' in capsys.readouterr().out


def test_a_semaphore_of_an_async_function_holds_for_all_batches(model):
  few = asyncio.Semaphore(2)

  async def mine(completion):
    async with few:
      await asyncio.sleep(0)
      return 1.0

  verify = verifier.verify(model, rewards=[mine])
  packed = text_arrays.pack(['1'] * 4)
  reference = text_arrays.Reference(packed, packed)
  rows = tokens.encode_completions(tokens.load_tokenizer(model), ['1'] * 4, 8)
  for _ in range(2):
    assert verify(reference, *rows).reward.tolist() == [1] * 4


def test_an_async_function_is_awaited_beside_a_running_loop(model):
  async def notebook():
    return judge(model, ['12'], rewards=[asks])

  assert asyncio.run(notebook()).reward.tolist() == [0.5]


def test_a_batched_reward_of_another_length_is_refused(model):
  short = base.Batched('short', lambda completions: [1.0])
  with pytest.raises(ValueError, match='gave 1 numbers for 2 completions'):
    judge(model, ['1', '2'], rewards=[short])


def test_a_function_of_a_module_can_be_isolated(model):
  mine = pool.isolated(rewards_of_mine.misbehave, processes=1)
  verdict = judge(model, ['crash', 'fine'], rewards=[answers_two, mine])
  assert verdict.terms['misbehave'].tolist() == [0, 0.5]
  assert verdict.terms['failed'].tolist() == [1, 0]


BAD = [
  ({'rewards': []}, '0 rewards and 0 weights'),
  (
    {'rewards': [length], 'weights': [1, 2]},
    '1 rewards and 2 weights: .* WEIGHTS in gin',
  ),
  ({'rewards': [length, length]}, 'of different names'),
  ({'rewards': ['length']}, 'is not a reward'),
  ({'rewards': [lambda prompt, answer: 0.0]}, 'cannot be called with a comple'),
  ({'rewards': [functions.correct]}, r'called by `\(\)` in a recipe'),
]


@pytest.mark.parametrize('settings, message', BAD)
def test_bad_rewards_are_refused_in_a_sentence(model, settings, message):
  with pytest.raises(ValueError, match=message):
    verifier.verify(model, **settings)


def completion(text='', tokens=1, limit=100):
  return base.Completion(text, '', '', tokens, limit)


@pytest.mark.parametrize(
  'text, boxed, thinks',
  [
    ('\\boxed{1}', 1, 0),
    ('\\boxed{}', 0, 0),
    ('\\boxed{ \n}', 0, 0),
    ('\\boxed{1} \\boxed{2}', 0, 0),
    ('<think>a</think>b', 0, 1),
    ('<think>a</think>\\boxed{b}', 1, 1),
    ('<think>a</think>', 0, 0),
    ('a<think>b</think>c', 0, 0),
    ('<think>a<think>b</think>c', 0, 0),
    ('</think>a<think>', 0, 0),
  ],
)
def test_formats(text, boxed, thinks):
  assert functions.boxed(completion(text)) == boxed
  assert functions.thinks(completion(text)) == thinks


@pytest.mark.parametrize(
  'text, thinks',
  [
    ('a</think>b', 1),
    ('</think>b', 0),
    ('a</think>', 0),
    ('a', 0),
    ('<think>a</think>b', 0),
    ('a</think>b</think>c', 0),
  ],
)
def test_a_thought_that_the_prompt_begins_is_ended(text, thinks):
  assert functions.thinks(completion(text), is_open=True) == thinks
  assert functions.thinks(completion('a</think>b')) == 0  # By default.


def test_length_is_punished_over_the_last_tokens():
  within = functools.partial(functions.within_length, buffer=20)
  lengths = np.array([1, 80, 85, 90, 100])
  got = [within(completion(tokens=int(n))) for n in lengths]
  np.testing.assert_allclose(got, [0, 0, -0.25, -0.5, -1])
  assert functions.finishes(completion(tokens=99)) == 1
  assert functions.finishes(completion(tokens=100)) == 0
