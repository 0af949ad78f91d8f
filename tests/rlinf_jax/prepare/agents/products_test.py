import numpy as np

from rlinf_jax.prepare.agents import products
from stages.tasks import arithmetic

DIGITS = arithmetic.Digits(3, 3)


def drawn(seed, held_out=False, **settings):
  rng = np.random.default_rng(seed)
  return products.draw(rng, 400, held_out, DIGITS, **settings)


def test_answers_are_those_of_the_questions():
  for problem in drawn(0, sums=0.25):
    question = problem['question'].removesuffix('=')
    a, b = map(int, question.replace('*', '+').split('+'))
    assert problem['answer'] == str(a * b if '*' in question else a + b)


def test_the_share_of_sums_is_as_asked_and_none_without():
  def sums(problems):
    return sum('+' in x['question'] for x in problems)

  assert sums(drawn(0, sums=0.25)) == 100
  assert sums(drawn(0)) == 0 and sums(drawn(0, sums=1.0)) == 400


def test_no_problem_is_both_held_out_and_trained_on():
  trained, held_out = (
    {x['question'] for seed in range(20) for x in drawn(seed, held, sums=0.5)}
    for held in (False, True)
  )
  assert not trained & held_out


def test_sums_are_always_given_to_the_calculator_and_products_seldom():
  rng, calls = np.random.default_rng(0), {'*': [], '+': []}
  for problem in drawn(0, sums=0.5):
    turns = products.script(rng, problem, tool_share=0.25)
    assert turns[-1] == problem['answer']
    calls['+' if '+' in problem['question'] else '*'].append(len(turns) == 2)
  assert all(calls['+'])
  # Four standard deviations of 200 products.
  assert abs(np.mean(calls['*']) - 0.25) < 4 * (0.25 * 0.75 / 200) ** 0.5
