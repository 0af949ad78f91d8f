"""Numbers as a completion writes them."""

import fractions
import itertools
import time

import pytest

from rlinf_jax.rewards import plain_numbers

VALUES = ['0', '7', '18', '-23', '1234', '-1234567', '12.50', '-0.25', '.5']
FORMS = [
  '{}',
  '{}.',
  '**{}**',
  'x = {}',
  'The answer is: {}',
  '${}$',
  '\\({}\\)',
  '\\text{{It is }} {} \\text{{ m}}^2',
  '{} eggs per day',
  '{}\\,\\mathrm{{km/h}}',
  '40 - 3 = {}',
]
SEPARATORS = [',', '{,}', '\\,', '~', ' ', '\u202f']
# With numbers around them, these would have to be worked out.
OPERATORS = [
  '-',
  ' - ',
  '+',
  '--',
  '\\,-',
  '\\times',
  ' x ',
  '*',
  '^',
  ':',
  '!',
]
OPERATORS += [
  '\\over ',
  '\\cdot',
  ' or ',
  ', ',
  '\\quad +',
  '\\bmod',
  '(',
  '/-',
]


@pytest.mark.parametrize('form', FORMS)
def test_a_number_is_read_in_every_form(form):
  for text in VALUES:
    number = plain_numbers.read(form.format(text))
    assert number and number.value == fractions.Fraction(text), text


@pytest.mark.parametrize('separator', SEPARATORS)
def test_thousands_may_be_grouped(separator):
  for value in 1_234, 1_234_567, 12_000:
    text = f'{value:,}'.replace(',', separator)
    assert plain_numbers.read(text).value == value
    assert plain_numbers.read(f'-{text}.5').value == -value - 0.5


@pytest.mark.parametrize('operator', OPERATORS)
def test_what_is_not_worked_out_is_no_number(operator):
  for a, b in itertools.product(['51', '2', '4.5'], ['28', '3.25']):
    assert plain_numbers.read(f'{a}{operator}{b}') is None


def test_fractions_mixed_numbers_and_powers_of_ten():
  for text, value in [
    ('\\frac12', '1/2'),
    ('-\\dfrac{3}{4}', '-3/4'),
    ('1\\frac{1}{2}', '3/2'),
    ('2 3/4 cups', '11/4'),
    ('1.5 \\times 10^{3}', '1500'),
    ('10^{-2}', '1/100'),
    ('-1.5E+3 kg', '-1500'),
    ('1e-30', f'1/{10**30}'),
    ('x = (3/4) m', '3/4'),
    ('It is: [ 12 % ]', '12'),
  ]:
    assert plain_numbers.read(text).value == fractions.Fraction(value)
  assert plain_numbers.read('1/0') is None
  assert plain_numbers.read('1 5/2') is None
  for text in ('1e99', '1e100', '2e', '0x1e3', '3.1e2.5', 'a1e3'):
    assert plain_numbers.read(text) is None, text


def test_a_rounded_number_is_the_one_after_the_sign():
  assert plain_numbers.read('x = 22.6 \\approx 23').value == 23
  assert plain_numbers.read('22 \\approx 23') is None
  assert plain_numbers.read('22 = 23') is None


def test_no_text_takes_long_to_read():
  pieces = ['a ', 'a', '-', '1 ', '1,', 'a-', ': ', '(', '"', '1/', 'x=', '10^']
  for piece in [*pieces, '*a', '{,}', '999,', '\\frac1', '\\text{', '≈', '\\,']:
    for end in '', '5', '!':
      for size in 199, 20_000:
        start = time.process_time()
        plain_numbers.read((piece * size)[:size] + end)
        assert time.process_time() - start < 0.1, piece
