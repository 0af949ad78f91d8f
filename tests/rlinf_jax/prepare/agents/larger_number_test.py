"""A solver and a critic of two numbers."""

import numpy as np
import pytest

from rlinf_jax.agents import base
from rlinf_jax.prepare.agents import larger_number


def draw(rows, held_out):
  return larger_number.draw(np.random.default_rng(0), rows, held_out)


def test_problems_are_asked_for_and_held_out_ones_are_others():
  trained, held_out = draw(500, False), draw(100, True)
  assert len(trained) == 500 and len(held_out) == 100
  pairs = [
    {frozenset(x['question'][:-1].split()) for x in part}
    for part in (trained, held_out)
  ]
  assert not pairs[0] & pairs[1]
  for x in trained:
    a, b = map(int, x['question'][:-1].split())
    assert int(x['answer']) == max(a, b) and a != b


@pytest.mark.parametrize(
  'first, verdict, second, solver, critic',
  [
    ('85', 'right', None, 1, 1),
    ('85', 'wrong', '85', 1, 0),
    ('85', 'wrong', '37', 0, 0),
    ('37', 'right', None, 0, 0),
    ('37', 'wrong', '85', 1, 1),
    ('37', 'what', None, 0, 0),
  ],
)
def test_both_roles_are_rewarded_for_their_own_part(
  first, verdict, second, solver, critic
):
  env = larger_number.LargerNumber()
  env.reset({'question': '37 85:', 'answer': '85'})
  texts = [first, verdict] + [second] * (second is not None)
  total, speaker = np.zeros(2), 0
  for i, text in enumerate(texts):
    step = env.step(text)
    total += base.rewards(env.roles, step.reward, speaker)
    assert step.terminated == (i == len(texts) - 1)
    speaker = env.roles.index(step.role) if step.role else speaker
  assert total.tolist() == [solver, critic]


def test_the_demonstrator_errs_as_often_as_it_is_told():
  rng = np.random.default_rng(0)
  (problem,) = draw(1, False)
  played = [larger_number.script(rng, problem, 0.6, 0.75) for _ in range(2000)]
  right = [texts[0] == problem['answer'] for texts in played]
  honest = [
    (texts[1] == 'right') == is_right
    for texts, is_right in zip(played, right, strict=True)
  ]
  assert np.mean(right) == pytest.approx(0.6, abs=0.04)
  assert np.mean(honest) == pytest.approx(0.75, abs=0.04)
  assert all(x[2:] == [problem['answer']] for x in played if x[1] == 'wrong')
