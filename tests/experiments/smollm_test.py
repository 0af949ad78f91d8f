"""The word problems of SmolLM2's experiment."""

import re

from experiments.smollm import word_problems


def test_held_out_questions_are_new_and_half_of_them_in_new_phrasings():
  train, held_out = word_problems.problems()
  assert (len(train), len(held_out)) == (2400, 500)
  questions = [row['prompt'] for row in train + held_out]
  assert len({*questions}) == len(questions)
  new = {phrasings[-1] for phrasings in word_problems.PHRASINGS.values()}
  shapes = [re.compile(_pattern(phrasing)) for phrasing in new]
  is_new = [any(s.fullmatch(row['prompt']) for s in shapes) for row in held_out]
  assert sum(is_new) == 250
  assert not any(s.fullmatch(row['prompt']) for s in shapes for row in train)


def test_answers_are_those_of_the_questions():
  for row in word_problems.problems()[0][:500]:
    (sign,) = [
      sign
      for sign, phrasings in word_problems.PHRASINGS.items()
      for phrasing in phrasings
      if re.fullmatch(_pattern(phrasing), row['prompt'])
    ]
    a, b = map(int, re.findall(r'\d+', row['prompt']))
    want = {'+': a + b, '-': a - b, '*': a * b}[sign]
    assert int(row['answer']) == want >= 0


def _pattern(phrasing: str) -> str:
  """A regular expression of the questions that a phrasing makes."""
  return re.sub(r'\\{\w+\\}', r'\\w+', re.escape(phrasing))
