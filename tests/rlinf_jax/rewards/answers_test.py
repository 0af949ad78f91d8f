import os
import time

import math_verify
import pytest

from rlinf_jax.data import files
from rlinf_jax.rewards import answers, base, plain_numbers


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
  ('\\boxed{\\frac{2}{4}}', '0.5'),
  ('\\boxed{x - 1}', 'x-1'),
  ('It is -5.', '-5'),
  ('\\boxed{2+\\sqrt{3}}', '\\sqrt{3}+2'),
  ('\\boxed{10^{3}}', '1000'),
  ('\\boxed{5}\n\n#### Check\nit holds', '5'),
  ('\\boxed{Paris}\n\n#### Check\nit holds', 'Paris'),
  ('#### Paris\nIt is the capital.', 'Paris'),
  ('\\boxed{5}\n\n#### Step 2: check 7\nit holds', '5'),
  ('#### Final answer\n18', '18'),
  ('#### Conclusion\nSo there are 18 eggs.', '18'),
  ('The answer is \u22125.', '-5'),
  ('It weighs 1.5 × 10^3 kg', '1500'),
  ('It weighs 1.5e3 kg', '1500'),
  ('The answer is 1e3.', '1000'),
  ('The answer is $1E3$', '1000'),
  ('\\boxed{2e-3}', '0.002'),
  ('The answer is (18).', '18'),
  ('\\boxed{\\left[-18\\right]}', '-18'),
]
# Forms of the number 18, and of 18,000.
NUMBERS = [
  '18.',
  '18 dollars',
  '**18**',
  '*18*',
  '`18`',
  '"18"',
  'The answer is 18',
  'The answer is **18**.',
  '18 eggs per day',
  '18\\ \\text{km/h}',
  '$18.00',
  '18\\%',
  'x = 18',
  '20 - 2 = 18',
]
THOUSANDS = ['18\\,000', '18 000', '18~000', '18{,}000', '18,000 dollars']
# Neither what they are worth nor another number is said.
UNWORKED = [
  ('51\\,-28', '23'),
  ('51\\;-28', '23'),
  ('10 \\, + 13', '23'),
  ('10\\quad+13', '23'),
  ('51\\,\\times\\,28', '1428'),
  ('51--28', '79'),
  ('51-+28', '23'),
  ('51+-28', '23'),
  ('51 -x+x-28', '23'),
  ('x-x+23', '23'),
  ('51^1 28^1', '1428'),
  ('51:3', '17'),
  ('51\\over3', '17'),
  ('5!', '120'),
  ('5!', '5'),
  ('2^{10}', '1024'),
  ('2¹⁰', '2'),
  ('\\binom{10}{3}', '120'),
  ('\\sqrt{529}', '23'),
  ('\\sum_{i=1}^{10} i', '55'),
  ('\\int_0^{2} x dx', '2'),
  ('\\log_2 1024', '10'),
  ('\\lfloor 23.7\\rfloor', '23'),
  ('22=23', '23'),
  ('22, x = 23', '23'),
  ('22 \\text{ or } 23', '23'),
  ('23x', '23'),
  ('2(23)', '23'),
  ('(23)(2)', '23'),
  ('(23)^2', '23'),
  ('\\sin (23)', '23'),
  ('absolute (23)', '23'),
  ('(1, 23)', '23'),
  ('(1,023)', '1023'),
  ('[23)', '23'),
  ('\\{23\\}', '23'),
  ('2e3x', '2'),
  ('1,2,3,23', '23'),
]
RIGHT_CHOICES = [
  ('The answer is A, as said. So choose D', 'D'),
  ('answer is A bit unclear, so choose D', 'D'),
  ('Answer: I think B', 'B'),
  ('\\boxed{b}', 'B'),
  ('\\boxed{\\textbf{(C)}\\ 12}', 'C'),
  ('C) 12', 'C'),
  ('I choose C', 'C'),
  ('The correct answer is \\text{C}', 'C'),
  ('The answer is $\\text{C}$', 'C'),
  ('The answer is C because it is round, and option B is wrong.', 'C'),
  ('#### The answer is B', 'B'),
]
TWO_CHOICES = [
  '\\boxed{A or B}',
  '\\boxed{A, B}',
  '\\boxed{A B}',
  '\\boxed{(A)(B)}',
  '#### A. B. C.',
  'The answer is A, B, C or D',
  'The answer is A or B.',
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
  ('The answer is 1e3.', '1'),
  ('The answer is $1e3$', '3'),
  ('The answer is 2e-3', '2'),
]


@pytest.mark.parametrize('text, answer', RIGHT)
def test_a_right_answer_is_recognized(text, answer):
  assert correct(text, answer)


@pytest.mark.parametrize('text, answer', WRONG)
def test_a_wrong_answer_is_not(text, answer):
  assert not correct(text, answer)


@pytest.mark.parametrize('form', ['#### {}', '\\boxed{{{}}}'])
def test_a_number_may_have_words_units_and_markdown(form):
  for value, texts in ('18', NUMBERS), ('18000', THOUSANDS):
    for text in texts:
      assert correct(form.format(text), value), text
      assert not correct(form.format(text), '19'), text


@pytest.mark.parametrize('form', ['#### {}', '\\boxed{{{}}}'])
def test_an_answer_that_is_not_worked_out_is_wrong(form):
  for text, value in UNWORKED:
    assert not correct(form.format(text), value), text


@pytest.mark.parametrize('text', ['1.5E3', '2E-3', '(18)', '[-18]', '(3/4)'])
def test_powers_of_ten_and_brackets_are_those_of_math_verify(text):
  value, _ = math_verify.parse(f'\\boxed{{{text}}}', parsing_timeout=None)
  assert float(plain_numbers.read(text).value) == float(value)


def test_choices_are_recognized():
  for text, choice in RIGHT_CHOICES:
    assert correct(text, choice), text
    assert not correct(text, 'J'), text


def test_two_choices_are_wrong_for_each_of_them():
  for text in TWO_CHOICES:
    assert not any(correct(text, choice) for choice in 'ABCD'), text


@pytest.mark.parametrize('answer', ['23', 'x+1', 'yes', 'B'])
def test_a_repetitive_last_line_takes_no_time(answer):
  correct('\\boxed{1}', 'x')  # The first call prepares the parser.
  for piece in '- ', 'ab-', '(', 'answer ', 'answer is', '\\text{', '* ', 'A, ':
    text = (piece * 10_000)[:10_000]
    for tail in '', ' ' * 9_000 + '!':
      start = time.process_time()
      assert not correct(text + tail, answer)
      assert time.process_time() - start < 0.5, piece


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
