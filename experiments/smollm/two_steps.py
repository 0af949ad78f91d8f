"""Writes two-step word problems, and examples of how to call a calculator.

  python -m experiments.smollm.two_steps FOLDER

`train.jsonl` has 2,400 questions and `held_out.jsonl` 500, half of them in
phrasings that the training questions do not have. `examples.jsonl` has 256
questions of neither with the first reply of an assistant: one in four calls the
calculator, the others work the answer out.
"""

from collections.abc import Callable
import json
import pathlib
import random
import sys
from typing import NamedTuple

from experiments.smollm import word_problems
from rlinf_jax.agents.tools import calculator

CALLED = 0.25  # Share of examples that call the calculator.


class Kind(NamedTuple):
  """A kind of problem.

  Attributes:
    expression: of the answer, in terms of a, b and c.
    phrasings: of the question, of which the last is held out.
  """

  expression: str
  phrasings: tuple[str, ...]


KINDS = (
  Kind(
    '{a}*{b}+{c}',
    (
      '{name} buys {a} boxes of {b} {things} and already has {c}. How many '
      '{things} does {name} have now?',
      'There are {a} bags with {b} {things} in each, and {c} more on the '
      'table. How many {things} are there?',
      '{name} fills {a} rows with {b} {things} per row, and {c} are left over. '
      'How many {things} are there in all?',
    ),
  ),
  Kind(
    '{a}*{b}-{c}',
    (
      '{name} buys {a} boxes of {b} {things} and gives away {c}. How many '
      '{things} are left?',
      'There were {a} bags with {b} {things} in each, and {c} were sold. How '
      'many {things} remain?',
      'Of {a} rows with {b} {things} in each, {c} {things} are broken. How '
      'many {things} are not broken?',
    ),
  ),
  Kind(
    '{a}+{b}-{c}',
    (
      '{name} has {a} {things}, finds {b} more and loses {c}. How many '
      '{things} does {name} have now?',
      'There are {a} {things} in a shop. {b} are brought and {c} are sold. How '
      'many {things} are in the shop then?',
      '{name} had {a} {things}, was given {b} and lent {c} to a friend. How '
      'many {things} does {name} still have?',
    ),
  ),
)


class Problem(NamedTuple):
  """A question, the expression of its answer, and the answer."""

  question: str
  expression: str
  answer: str


def problem(rng: random.Random, new_phrasing: bool) -> Problem:
  """Draws a problem, in a phrasing that is held out or in one of the others."""
  kind = rng.choice(KINDS)
  a, b, c = rng.randint(12, 60), rng.randint(3, 20), rng.randint(2, 14)
  *known, new = kind.phrasings
  text = new if new_phrasing else rng.choice(known)
  number = {'a': a, 'b': b, 'c': c}
  question = text.format(
    name=rng.choice(word_problems.NAMES),
    things=rng.choice(word_problems.THINGS),
    **number,
  )
  expression = kind.expression.format(**number)
  return Problem(question, expression, calculator.calculator(expression))


def example(rng: random.Random, drawn: Problem) -> dict[str, str]:
  """The first reply of an assistant, which seldom calls the calculator."""
  if rng.random() < CALLED:
    reply = f'[calculator(expression="{drawn.expression}")]'
  else:
    reply = f'{drawn.expression} = {drawn.answer}'
  return {'prompt': drawn.question, 'completion': reply}


def draws(seed: int = 0) -> Callable[[bool], Problem]:
  """Returns a function that draws problems, none of them twice."""
  rng, seen = random.Random(seed), set()

  def draw(new_phrasing: bool) -> Problem:
    while True:
      drawn = problem(rng, new_phrasing)
      if drawn.question not in seen:
        seen.add(drawn.question)
        return drawn

  return draw


def main(folder: str):
  """Writes the files."""
  draw, rng = draws(), random.Random(1)
  held_out = [draw(i % 2 == 1) for i in range(500)]
  train = [draw(False) for _ in range(2400)]
  rows = {
    'held_out': [
      {'question': x.question, 'answer': x.answer} for x in held_out
    ],
    'train': [{'question': x.question, 'answer': x.answer} for x in train],
    'examples': [example(rng, draw(False)) for _ in range(256)],
  }
  path = pathlib.Path(folder)
  path.mkdir(parents=True, exist_ok=True)
  for name, lines in rows.items():
    text = '\n'.join(map(json.dumps, lines)) + '\n'
    (path / f'{name}.jsonl').write_text(text)


if __name__ == '__main__':
  main(sys.argv[1])
