import copy
import itertools
import re

import jax
import numpy as np
import pytest

from stages.language import tokens
from stages.tasks import arithmetic

DIGITS = arithmetic.Digits(1, 4)


@pytest.fixture(scope='module')
def checkpoint(tmp_path_factory):
  folder = tmp_path_factory.mktemp('tokenizer')
  tokens.train_tokenizer(folder, arithmetic.corpus(), 64)
  return str(folder)


def problems(checkpoint, **settings):
  settings = {
    'batch_size': 32,
    'prompt_length': 10,
    'digits': DIGITS,
  } | settings
  return arithmetic.problems(checkpoint, **settings)


def examples(checkpoint, **settings):
  settings = {
    'batch_size': 32,
    'prompt_length': 10,
    'response_length': 48,
  } | settings
  return arithmetic.examples(checkpoint, digits=DIGITS, **settings)


def run(source, batches, seed=0):
  state = source.init(seed)
  for _ in range(batches):
    state, batch = source.next(state, {})
    yield batch


def operands_of(source, prompt):
  """The pairs of operands in the prompts."""
  return [
    tuple(map(int, re.fullmatch(r'(\d+)\+(\d+)=', text).groups()))
    for text in source.text(*prompt)
  ]


def equal(got, want):
  jax.tree.map(np.testing.assert_array_equal, got, want)


def test_a_worked_answer_by_hand():
  assert arithmetic.worked_answer(347, 58) == '7+8=15,4+5+1=10,3+1=4;405'
  assert arithmetic.worked_answer(58, 347) == '8+7=15,5+4+1=10,3+1=4;405'
  assert arithmetic.worked_answer(5, 999) == '5+9=14,9+1=10,9+1=10;1004'
  assert arithmetic.worked_answer(20, 30) == '0+0=0,2+3=5;50'


def test_worked_answers_are_right():
  rng = np.random.default_rng(0)
  pairs = [
    *itertools.product(range(0, 130, 3), repeat=2),
    *rng.integers(10**5, size=(3000, 2)).tolist(),
  ]
  for a, b in pairs:
    work, answer = arithmetic.worked_answer(a, b).split(';')
    assert int(answer) == a + b
    carry, written, operands = 0, 0, 0
    for i, column in enumerate(work.split(',')):
      digits, total = column.split('=')
      digits = list(map(int, digits.split('+')))
      assert int(total) == sum(digits)
      if carry:
        assert digits.pop() == 1
      carry, digit = divmod(int(total), 10)
      written += digit * 10**i
      operands += sum(digits) * 10**i
    assert operands == a + b, 'the columns should be those of the operands'
    assert written + carry * 10 ** (i + 1) == a + b


def test_what_is_held_out_does_not_depend_on_the_order():
  rng = np.random.default_rng(0)
  a, b = rng.integers(10**6, size=(2, 100_000))
  is_held_out = arithmetic.is_held_out(a, b)
  np.testing.assert_array_equal(is_held_out, arithmetic.is_held_out(b, a))
  # Five standard deviations of a count.
  share = 1 / arithmetic.HELD_OUT
  assert abs(is_held_out.mean() - share) < 5 * (share / is_held_out.size) ** 0.5


def test_training_never_meets_a_held_out_pair(checkpoint):
  source = problems(checkpoint)
  held_out = {
    pair
    for part in source.held_out()
    for pair in operands_of(source, part.prompt)
  }
  assert len(held_out) > 400
  held_out |= {(b, a) for a, b in held_out}
  trained = {
    pair
    for seed in range(3)
    for batch in run(source, 40, seed)
    for pair in operands_of(source, batch.prompt)
  }
  assert len(trained) > 3000
  assert not trained & held_out
  imitated = {
    pair
    for batch in run(examples(checkpoint), 60)
    for pair in operands_of(source, batch.prompt)
  }
  assert len(imitated) > 1500
  assert not imitated & held_out
  spelled = {
    tuple(map(int, re.match(r'(\d+)\+(\d+)=', line).groups()))
    for line in arithmetic.corpus()
  }
  assert not spelled & held_out


def test_all_sources_hold_out_the_same_problems(checkpoint):
  source = problems(checkpoint, held_out=48, held_out_batch=16)
  parts = source.held_out()
  assert [len(part.answer) for part in parts] == [16] * 3
  equal(parts, source.held_out())
  equal(parts, examples(checkpoint, held_out=48, held_out_batch=16).held_out())


def test_held_out_problems_must_fill_their_batches(checkpoint):
  with pytest.raises(ValueError, match='500 held-out problems cannot be cut'):
    problems(checkpoint, held_out=500, held_out_batch=256)


def test_answers_are_the_sums_of_the_operands(checkpoint):
  source = problems(checkpoint)
  for batch in [*run(source, 5), *source.held_out()]:
    assert batch.answer.tolist() == [
      a + b for a, b in operands_of(source, batch.prompt)
    ]


def test_examples_are_worked_answers_that_end(checkpoint):
  source = examples(checkpoint)
  end = tokens.load_tokenizer(checkpoint).eos_token_id
  for batch in run(source, 5):
    assert source.text(batch.action, batch.mask) == [
      arithmetic.worked_answer(a, b)
      for a, b in operands_of(source, batch.prompt)
    ]
    last = batch.mask.sum(1).astype(int) - 1
    assert (batch.action[np.arange(len(last)), last] == end).all()


@pytest.mark.parametrize('least, most', [(0, 3), (4, 3), (3, 10)])
def test_operands_whose_sum_would_not_fit_are_refused(least, most):
  rng, digits = np.random.default_rng(0), arithmetic.Digits(least, most)
  with pytest.raises(ValueError, match=f'{least} to {most} digits'):
    arithmetic.pairs(rng, 4, digits, False)


def test_operands_are_short_as_often_as_long():
  pair = arithmetic.pairs(np.random.default_rng(0), 4000, DIGITS, False)
  assert pair.shape == (4000, 2)
  lengths = np.char.str_len(pair.astype(str))
  often = np.bincount(lengths.ravel(), minlength=6) / lengths.size
  np.testing.assert_allclose(often, [0, 0.25, 0.25, 0.25, 0.25, 0], atol=0.03)


@pytest.mark.parametrize('make', [problems, examples])
def test_a_source_resumes_from_its_saved_state(make, checkpoint):
  source = make(checkpoint)
  state = source.init(7)
  for _ in range(3):
    state, _ = source.next(state, {})
  kept = copy.deepcopy(state)
  assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves(kept))
  straight, resumed = [], []
  for _ in range(3):
    state, batch = source.next(state, {'rollout/accuracy': 0.5})
    straight.append(batch)
  again = make(checkpoint)
  for _ in range(3):
    kept, batch = again.next(kept, {})
    resumed.append(batch)
  equal(resumed, straight)
  equal(kept, state)


def test_batches_and_seeds_differ(checkpoint):
  source = problems(checkpoint)
  batches = [*run(source, 3, seed=0), *run(source, 3, seed=1)]
  for one, other in itertools.combinations(batches, 2):
    assert (one.answer != other.answer).any()


def test_prompts_follow_the_template(checkpoint):
  source = problems(checkpoint, template='{b}+{a};', batch_size=4)
  batch = next(run(source, 1))
  for text, answer in zip(
    source.text(*batch.prompt), batch.answer, strict=True
  ):
    b, a = re.fullmatch(r'(\d+)\+(\d+);', text).groups()
    assert int(a) + int(b) == answer
  plain = next(run(problems(checkpoint, batch_size=4), 1))
  equal(batch.answer, plain.answer)


COMPLETIONS = {
  '7+8=15,4+5+1=10,3+1=4;405': 1,
  '405': 1,
  '404+1=405': 1,
  '7+8=15,4+5+1=10,3+1=4;406': 0,
  '405;1': 0,
  '4050': 0,
  '0405': 0,
  '4,0,5': 0,
  ';': 0,
  '': 0,
}


@pytest.mark.parametrize('text, right', COMPLETIONS.items())
def test_the_last_number_is_judged(text, right, checkpoint):
  verify = arithmetic.verify(checkpoint)
  rows = tokens.encode_completions(
    tokens.load_tokenizer(checkpoint), [text], 30
  )
  verdict = verify(np.array([405], np.int32), *rows)
  assert verdict.reward == verdict.correct == right
  assert verdict.reward.dtype == np.float32


def test_each_row_is_judged_by_its_own_answer(checkpoint):
  verify = arithmetic.verify(checkpoint)
  action, mask = tokens.encode_completions(
    tokens.load_tokenizer(checkpoint), ['12', '12', '34', '34'], 5
  )
  mask[3, 1:] = 0  # Only the 3 was drawn.
  verdict = verify(np.array([12, 34, 34, 34], np.int32), action, mask)
  assert verdict.correct.tolist() == [1, 0, 1, 0]


def test_all_worked_answers_are_judged_right(checkpoint):
  verify, source = arithmetic.verify(checkpoint), examples(checkpoint)
  for batch in run(source, 3):
    answer = np.array([a + b for a, b in operands_of(source, batch.prompt)])
    assert verify(answer, batch.action, batch.mask).correct.all()
