"""Writes one-step word problems: sums, differences and products.

  python -m experiments.smollm.word_problems FOLDER

`train.jsonl` has 2,400 questions and `held_out.jsonl` 500, half of them in
phrasings that the training questions do not have. No question is in both.
`sums.jsonl`, `differences.jsonl` and `products.jsonl` have the training
questions of one operation, for mixtures.
"""

import json
import pathlib
import random
import sys

NAMES = (
  'Ana Ben Chloe Dan Emma Finn Grace Hugo Iris Jack Kim Leo Mia Noah'.split()
)
THINGS = (
  'apples books coins eggs flowers marbles pencils stamps shells stickers'
).split()
OPERATIONS = {'+': 'sums', '-': 'differences', '*': 'products'}
# The last phrasing of each operation is held out.
PHRASINGS = {
  '+': (
    '{name} has {a} {things} and buys {b} more. How many {things} does {name} '
    'have now?',
    'There are {a} {things} on the table and {b} {things} in a bag. How many '
    '{things} are there in total?',
    '{name} found {a} {things} on Monday and {b} {things} on Tuesday. How many '
    '{things} did {name} find in all?',
    '{name} keeps {a} {things} at home. A friend brings {b} {things}. What is '
    'the total number of {things}?',
  ),
  '-': (
    '{name} has {a} {things} and gives away {b} of them. How many {things} are '
    'left?',
    'There were {a} {things} in a shop, and {b} were sold. How many {things} '
    'remain?',
    '{name} had {a} {things} and lost {b}. How many {things} does {name} still '
    'have?',
    'Of {a} {things}, {b} are broken. How many {things} are not broken?',
  ),
  '*': (
    'There are {a} boxes with {b} {things} in each. How many {things} are '
    'there in total?',
    '{name} buys {a} bags of {b} {things} each. How many {things} does {name} '
    'buy?',
    'Each of {a} children has {b} {things}. How many {things} do they have '
    'together?',
    '{name} fills {a} rows with {b} {things} per row. How many {things} does '
    '{name} need?',
  ),
}


def problem(rng: random.Random, new_phrasing: bool) -> dict[str, str]:
  """A question, its answer and its operation."""
  sign = rng.choice('+-*')
  if sign == '*':
    a, b = rng.randint(2, 9), rng.randint(2, 9)
  else:
    a, b = rng.randint(3, 60), rng.randint(2, 40)
    a, b = (max(a, b), min(a, b)) if sign == '-' else (a, b)
  *known, new = PHRASINGS[sign]
  text = new if new_phrasing else rng.choice(known)
  answer = {'+': a + b, '-': a - b, '*': a * b}[sign]
  question = text.format(
    name=rng.choice(NAMES), things=rng.choice(THINGS), a=a, b=b
  )
  operation = OPERATIONS[sign]
  return {'prompt': question, 'answer': str(answer), 'operation': operation}


def problems(num_train: int = 2400, num_held_out: int = 500, seed: int = 0):
  """The training and the held-out questions."""
  rng, seen = random.Random(seed), set()

  def draw(new_phrasing):
    while True:
      row = problem(rng, new_phrasing)
      if row['prompt'] not in seen:
        seen.add(row['prompt'])
        return row

  held_out = [draw(i % 2 == 1) for i in range(num_held_out)]
  return [draw(False) for _ in range(num_train)], held_out


def main(folder: str):
  """Writes all files."""
  path = pathlib.Path(folder)
  path.mkdir(parents=True, exist_ok=True)
  train, held_out = problems()
  files = {'train': train, 'held_out': held_out}
  for name in OPERATIONS.values():
    files[name] = [row for row in train if row['operation'] == name]
  for name, rows in files.items():
    lines = [json.dumps(row) for row in rows]
    (path / f'{name}.jsonl').write_text('\n'.join(lines) + '\n')


if __name__ == '__main__':
  main(sys.argv[1])
