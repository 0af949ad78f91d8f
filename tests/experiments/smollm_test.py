"""The word problems of SmolLM2's experiment."""

import pathlib
import random
import re
import shlex

from experiments.smollm import gsm8k, two_steps, word_problems
from rlinf_jax import gin_flags
from rlinf_jax.config import config

ROOT = pathlib.Path(__file__).parents[2]


def test_the_commands_of_the_page_can_be_read(monkeypatch, tmp_path):
  monkeypatch.chdir(ROOT)
  page = (ROOT / 'experiments/smollm/README.md').read_text()
  commands = re.findall(r'(?<=\n)python -m rlinf_jax.main (.*?)```', page, re.S)
  assert len(commands) > 1
  for command in commands:
    words = shlex.split(command.replace('\\\n', ' '))
    bindings = [
      flag.partition('=')[2]
      for flag in map(gin_flags.as_binding, words)
      if flag.startswith('--gin_bindings=')
    ]
    file = words[words.index('--gin_file') + 1]
    config.parse([file], bindings, str(tmp_path))


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


def test_the_easiest_questions_of_gsm8k_take_the_fewest_steps():
  rows = [
    {'question': str(i), 'answer': answer + '\n#### 3'}
    for i, answer in enumerate(('1\n2', '1 + 2', '3', '1\n2\n3', '1 + 1 + 1'))
  ]
  found = [gsm8k.easiest(rows, count) for count in range(6)]
  assert [[row['question'] for row in x] for x in found] == [
    *([], ['2'], ['1', '2'], ['1', '2', '4'], ['0', '1', '2', '4']),
    ['0', '1', '2', '3', '4'],
  ]


def test_two_steps_are_answered_by_their_expression():
  draw = two_steps.draws()
  problems = [draw(i % 2 == 0) for i in range(300)]
  assert len({x.question for x in problems}) == len(problems)
  for question, expression, answer in problems:
    a, b, c = map(int, re.findall(r'\d+', question))
    known = {a * b + c, a * b - c, a + b - c}
    assert int(answer) in known and int(answer) >= 0
    assert [*map(int, re.findall(r'\d+', expression))] == [a, b, c]
  replies = [
    two_steps.example(random.Random(i), problems[i]) for i in range(300)
  ]
  called = sum(x['completion'].startswith('[calculator(') for x in replies)
  assert 50 < called < 100  # A quarter of 300, five standard deviations.


def test_both_recipes_of_two_steps_have_the_same_system_message():
  texts = [
    (ROOT / f'experiments/smollm/{name}.gin').read_text()
    for name in ('calls', 'calculator')
  ]
  lines = {
    line for text in texts for line in re.findall('^SYSTEM = .*', text, re.M)
  }
  assert len(lines) == 1


def _pattern(phrasing: str) -> str:
  """A regular expression of the questions that a phrasing makes."""
  return re.sub(r'\\{\w+\\}', r'\\w+', re.escape(phrasing))
