"""Larger numbers that a solver names and a critic checks, for two roles.

The solver reads `37 85:` and names the larger. The critic reads `37 85:85` and
says `right` or `wrong`. If it says `wrong`, the solver hears so, and answers
again. The solver is rewarded for its last answer, and the critic for what it
said of the first.
"""

from collections.abc import Sequence

import numpy as np

from rlinf_jax.agents import base
from stages import ranges
from stages.tasks import arithmetic

SPARE = 64  # Pairs that may be of equal numbers, which are left out.
VERDICTS = ('wrong', 'right')


class LargerNumber:
  """An episode of a solver and a critic."""

  roles = ('solver', 'critic')
  terms = ('first_right', 'second_tries')

  def reset(self, problem: dict[str, str]) -> dict[str, list[base.Message]]:
    self._question, self._answer = problem['question'], problem['answer']
    self._first = None  # Whether the first answer is right, once it is given.
    self._is_checked = False
    return {
      'solver': [_message(self._question)],
      'critic': [_message('check')],
    }

  def step(self, text: str) -> base.TimeStep:
    is_right = text.strip() == self._answer
    if self._first is None:
      self._first = is_right
      return base.TimeStep(
        [_message(self._question + text.strip())],
        terms={'first_right': float(is_right)},
        role='critic',
      )
    if self._is_checked:
      return base.TimeStep(reward=float(is_right), terminated=True)
    self._is_checked = True
    critic = float(text.strip() == VERDICTS[self._first])
    if text.strip() != 'wrong':
      reward = {'solver': float(self._first), 'critic': critic}
      return base.TimeStep(reward=reward, terminated=True)
    return base.TimeStep(
      [_message('wrong')],
      reward=critic,
      terms={'second_tries': 1.0},
      role='solver',
    )


def _message(text: str) -> base.Message:
  return {'role': 'user', 'content': text}


def draw(
  rng: np.random.Generator, rows: int, held_out: bool
) -> list[dict[str, str]]:
  """Problems with two numbers; no pair is both held out and trained on."""
  digits = arithmetic.Digits(2, 2)
  pair = arithmetic.pairs(rng, 2 * rows + SPARE, digits, held_out)
  pair = pair[pair[:, 0] != pair[:, 1]][:rows]
  return [
    {'question': f'{a} {b}:', 'answer': str(max(a, b))}
    for a, b in pair.tolist()
  ]


def script(
  rng: np.random.Generator,
  problem: dict[str, str],
  right_share: ranges.Fraction = 0.6,
  honest_share: ranges.Fraction = 0.6,
) -> list[str]:
  """The turns of a demonstrator who errs in both roles.

  Only the second answer of the solver is always right.

  Args:
    rng: draws the errors.
    problem: the problem.
    right_share: probability that the solver's first answer is right.
    honest_share: probability that the critic says what is the case.
  """
  numbers = problem['question'].removesuffix(':').split()
  is_right = rng.random() < right_share
  first = (max if is_right else min)(numbers)
  says_right = is_right == (rng.random() < honest_share)
  turns = [first, VERDICTS[says_right]]
  return turns if says_right else [*turns, problem['answer']]


def corpus() -> Sequence[str]:
  """Texts to train a tokenizer on."""
  words = [f'\n{verdict}\n' for verdict in VERDICTS] * 50 + ['check'] * 50
  return [*words, '0 1 2 3 4 5 6 7 8 9 : ', 'abcdefghijklmnopqrstuvwxyz -']
