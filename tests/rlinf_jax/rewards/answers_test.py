import os

import pytest

from rlinf_jax.data import files
from rlinf_jax.rewards import answers, base


def correct(text, answer):
  return answers.correct(base.Completion(text, '', answer, 1, 8)) == 1.0


RIGHT = [
  ('The answer is \\boxed{\\frac{1}{2}}', '0.5'),
  ('so $x=\\frac12$', '1/2'),
  ('Final answer is $x=3$', '3'),
  ('It costs \\boxed{1,234} dollars', '1234'),
  ('We add 3 and 4. The answer is 7.', '7'),
  ('wrong: \\boxed{3}\nright: \\boxed{4}', '4'),
  ('\\boxed{\\{1,2\\}}', '\\{2,1\\}'),
  ('\\boxed{[1,2)}', '[1,2)'),
  ('[1,2)', '[1,2)'),
  ('\\boxed{(3, \\frac{\\pi}{2})}', '\\left(3, \\frac{\\pi}{2}\\right)'),
  ('\\boxed{x^2+2x+1}', '(x+1)^2'),
  ('It is 50\\%.', '0.5'),
  ('It is $50\\%$.', '0.5'),
  ('It is 50%, or 50\\%', '1/2'),
  ('(1,2345)', '(1,2345)'),
  ('It costs 2,125 dollars.', '2125'),
  ('It costs 1,234,567.', '1234567'),
  ('\\boxed{5}', 'Hence it is $\\boxed{5}$.'),
  ('I had 5, then\n#### 6', '6'),
  ('\\boxed{\\text{(B)}}', 'B'),
  ('A is wrong. The answer is (B).', 'B'),
  ('C', 'C'),
  ('\\boxed{\\text{Paris}}', 'Paris'),
  ('The answer is Tuesday.', 'Tuesday'),
  ('Emma has 51 - 28 = 23 shells left', '23'),
  ('\\boxed{1.5 \\times 10^3}', '1500'),
  ('\\boxed{2^{10}}', '1024'),
  ('\\boxed{\\frac{2}{4}}', '0.5'),
  ('\\boxed{x - 1}', 'x-1'),
  ('It is -5.', '-5'),
  ('\\boxed{2+\\sqrt{3}}', '\\sqrt{3}+2'),
]
WRONG = [
  ('\\boxed{0.51}', '1/2'),
  ('\\boxed{3} and not 4', '4'),
  ('#### 7', '6'),
  ('The total is 2,1251.', '2,125'),
  ('2,1251', '2125'),
  ('It is 1,234,5678.', '1234567'),
  ('It is 50\\%.', '0.6'),
  ('\\boxed{[1,2]}', '[1,2)'),
  ('\\boxed{A}', 'B'),
  ('the answer is a banana', 'A'),
  ('\\boxed{Apple}', 'A'),
  ('\\boxed{siraP}', 'Paris'),  # As a product of letters it is the same.
  ('', '1'),
  ('', 'B'),
  ('', 'Paris'),
  ('\\boxed{', '1'),
  ('1 2 3 4 5 6 7 8 9', '5'),
  # Numbers that are not worked out.
  ('Emma has 51 - 28', '23'),
  ('Hugo has a total of 23 + 34 books', '57'),
  ('#### 6 * 9', '54'),
  ('\\boxed{6 \\times 9}', '54'),
  ('\\boxed{20/4}', '5'),
  ('\\boxed{\\frac{10}{2}}', '5'),
  ('\\boxed{\\frac{1}{4}+\\frac{1}{4}}', '1/2'),
  ('x = 21*10 + 10', '220'),
]


@pytest.mark.parametrize('text, answer', RIGHT)
def test_a_right_answer_is_recognized(text, answer):
  assert correct(text, answer)


@pytest.mark.parametrize('text, answer', WRONG)
def test_a_wrong_answer_is_not(text, answer):
  assert not correct(text, answer)


@pytest.mark.slow
@pytest.mark.skipif(
  not os.environ.get('GSM8K_DIR'),
  reason='GSM8K_DIR is not set to the folder of GSM8K.',
)
def test_all_gold_answers_of_gsm8k_are_right_and_all_perturbed_are_wrong():
  golds = files.read('$GSM8K_DIR/test.jsonl')
  texts = files.read('$GSM8K_DIR/test.jsonl', answer_after='')
  assert len(golds) == 1319
  for row, text in zip(golds, texts, strict=True):
    working, number = text.answer.rpartition('####')[0], row.answer
    other = int(number.replace(',', '')) + 1
    for form in '#### {}', '\\boxed{{{}}}':
      assert correct(working + form.format(number), number), row.where
      assert not correct(working + form.format(other), number), row.where
