"""Final answers of completions, and their votes."""

import time

import pytest

from rlinf_jax.rewards import final_answer

SAME = [
  ['It is 0.5', '\\boxed{\\frac{1}{2}}', '\\boxed{\\dfrac{2}{4}}', '#### .50'],
  ['\\boxed{1,234}', 'so 1234.', '\\boxed{$1234.0$}', '\\boxed{1{,}234}'],
  ['it is 1.2e3', '1200', '#### (1200)', '\\boxed{[1.2E3]}'],
  ['-5', '\u22125', '\\boxed{\u22125}', '#### **-5**', '12\u2212-5'],
  ['\\boxed{\\frac13}', '1/3'],
  ['#### 18.\n', '\\boxed{18}\n#### Check\nit holds', '#### Answer\n18'],
  ['\\boxed{-3}', '-3/1', '\\boxed{-\\frac{6}{2}}'],
  ['\\boxed{0}', '\\boxed{-0}', '0.0'],
  ['\\boxed{X + 1}', '\\boxed{x+1}'],
  ['\\boxed{1/0}', '1/0'],
]


@pytest.mark.parametrize('texts', SAME)
def test_votes_for_one_answer_are_equal(texts):
  assert len({final_answer.vote(text) for text in texts}) == 1


def test_votes_for_other_answers_differ():
  votes = [final_answer.vote(texts[0]) for texts in SAME]
  assert len({*votes, final_answer.vote('\\boxed{0.51}')}) == len(SAME) + 1
  assert None not in votes
  assert final_answer.vote('no number') is None


def test_a_long_number_takes_no_time_and_is_text():
  digits = '9' * 9_000
  for text in digits, f'1/{digits}', f'0.{digits}', f'\\boxed{{{digits}}}':
    start = time.process_time()
    assert final_answer.vote(text) == final_answer.vote(text)
    assert time.process_time() - start < 0.1
