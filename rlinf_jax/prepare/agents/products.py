"""Products of large numbers, which a small model needs a calculator for.

The problem is `834*592=`. A demonstrator answers at once, or writes the call
`[calculator(expression="834*592")]` and repeats the result. Sums of large
numbers, which it always gives to the calculator, teach a model to repeat
results, and leave open whether it calls the calculator for a product.
"""

from collections.abc import Sequence

import numpy as np

from rlinf_jax.agents import formats
from rlinf_jax.agents.tools import calculator
from stages import ranges
from stages.tasks import arithmetic

SPARE = 16  # Pairs to choose each from.
ADDEND = arithmetic.Digits(4, 5)  # Sums are about as long as products of 3.
# Says what goes wrong most often, so that the tokenizer knows its letters.
ERROR = 'error: there is no such tool, only calculator'


def draw(
  rng: np.random.Generator,
  rows: int,
  held_out: bool,
  digits: arithmetic.Digits = arithmetic.Digits(),
  sums: ranges.Fraction = 0.0,
) -> list[dict[str, str]]:
  """Problems with random operands; no pair is both held out and trained on.

  All lengths of the product are about equally frequent, so that a model cannot
  learn to copy results of the commonest length alone.

  Args:
    rng: draws the problems.
    rows: how many.
    held_out: whether they are those that are not trained on.
    digits: of the operands of a product.
    sums: share of problems that are sums instead, of numbers of 4 to 5 digits.
  """
  count = round(sums * rows)
  problems = _products(rng, rows - count, held_out, digits)
  for a, b in arithmetic.pairs(rng, count, ADDEND, held_out).tolist():
    problems.append({'question': f'{a}+{b}=', 'answer': str(a + b)})
  return problems


def _products(
  rng: np.random.Generator,
  rows: int,
  held_out: bool,
  digits: arithmetic.Digits,
) -> list[dict[str, str]]:
  """Products whose lengths are about equally frequent."""
  if not rows:
    return []
  pair = arithmetic.pairs(rng, SPARE * rows, digits, held_out)
  length = np.char.str_len(pair.prod(1).astype(str))
  _, kind, count = np.unique(length, return_inverse=True, return_counts=True)
  share = 1.0 / count[kind]
  chosen = rng.choice(len(pair), rows, replace=False, p=share / share.sum())
  return [
    {'question': f'{a}*{b}=', 'answer': str(a * b)}
    for a, b in pair[chosen].tolist()
  ]


def script(
  rng: np.random.Generator,
  problem: dict[str, str],
  tool_share: ranges.Fraction = 0.1,
) -> list[str]:
  """The turns of a demonstrator, who seldom calls the calculator for a product.

  Args:
    rng: draws whether it does.
    problem: the problem; a sum is always given to the calculator.
    tool_share: probability of a call; else the product is written at once.
  """
  if '*' in problem['question'] and rng.random() >= tool_share:
    return [problem['answer']]
  return [call(problem['question'][:-1]), problem['answer']]


def call(expression: str) -> str:
  """A call of the calculator, as `formats.pythonic` reads it."""
  return f'[calculator(expression="{expression}")]'


def environment(
  digits: arithmetic.Digits = arithmetic.Digits(),
  rows: ranges.PositiveInt = 4096,
):
  """The task as an environment of the library `verifiers`.

  Args:
    digits: numbers of digits of the operands.
    rows: problems to train on; an eighth as many are for evaluation.
  """
  import datasets
  import verifiers

  rng = np.random.default_rng(0)
  to_train, to_evaluate = (
    datasets.Dataset.from_list(draw(rng, n, held_out, digits))
    for n, held_out in ((rows, False), (-(-rows // 8), True))
  )

  def correct(parser, completion, answer) -> float:
    return float((parser.parse_answer(completion) or '').strip() == answer)

  return verifiers.ToolEnv(
    dataset=to_train,
    eval_dataset=to_evaluate,
    tools=[calculator.calculator],
    rubric=verifiers.Rubric(funcs=[correct]),
    max_turns=3,
  )


def corpus(num_problems: ranges.PositiveInt = 1000) -> Sequence[str]:
  """Texts of the task, to train a tokenizer on."""
  rng = np.random.default_rng(0)
  texts = []
  for problem in draw(rng, num_problems, False):
    said = formats.answer(
      None, [{'role': 'tool', 'content': problem['answer']}], chat=False
    )
    texts.append(problem['question'] + call(problem['question'][:-1]) + said)
  alphabet = 'abcdefghijklmnopqrstuvwxyz'
  return [*texts, ERROR, alphabet, alphabet.upper(), '+-*/(). :,;\'"=[]_<>']
