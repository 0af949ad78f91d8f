"""Whether a completion's final answer is right, by `math-verify`.

Answers are compared as mathematics: 1/2 is 0.5, {1,2} is {2,1}. Run it in
`pool.isolated`: what it parses may take any time and any memory.
"""

import functools
import re

import math_verify

from rlinf_jax.rewards import base, final_answer

CHOICE = re.compile(r'\(?([A-J])\)?[.:]?')
CHOICE_FIRST = re.compile(r'\(?([A-J])\b')
# The last of these is the choice of a completion without a box.
STATED_CHOICE = re.compile(
  r'(?i:answer|choice|option)\s*(?i:is|:)?:?\s*[*$(]*\s*([A-J])\b'
)
WORDS = re.compile(r'[^\W\d_]{2,}(?:[ -][^\W\d_]+)*')
STATED = re.compile(r'(?:answer|result)\s*(?:is|:|=)\s*(.+)', re.I)
# Math-Verify would read the beginning of these as a number: 2,125 of 2,1251.
# Not in brackets, where commas separate.
MISGROUPED = re.compile(r'(?<![\d(\[{,.])\d{1,3}(?:,\d{3})+\d+')
# Sums, differences and products of numbers. 1.5 × 10^3 is one number.
UNWORKED = re.compile(
  r'[\d)}\]%]\s*(?:[+−*×·-]|\\(?:times|cdot))\s*(?!10\s*(?:\^|\*\*))[\d(\\{.$]'
)
QUOTIENT = re.compile(r'\\[dt]?frac|[\d)}\]]\s*(?:/|÷|\\div)\s*[\d(\\{]')
TEXT_COMMAND = re.compile(r'\\(?:text|textbf|mathrm|mathbf)\s*{([^{}]*)}')


def correct(completion: base.Completion) -> float:
  """1 if the final answer of a completion is its answer, else 0.

  The final answer is what follows `####`, or is in `\\boxed{}`, or is stated
  last. An answer of one letter (A … J) is a multiple choice, and an answer in
  words is compared letter by letter; all others are compared as mathematics.
  Where the answer is a number, one that is not worked out is wrong: 51 - 28 is
  not 23, or a model would learn to leave the work to this function.
  """
  gold = final_answer.unboxed(completion.answer).strip().strip('$').strip()
  text = completion.text[-final_answer.MAX_CHARACTERS :]
  final = final_answer.find(text)
  if choice := CHOICE.fullmatch(_plain(gold)):
    return float(_choice(text, final) == choice[1])
  if WORDS.fullmatch(_plain(gold)):
    return float(_in_words(text, final).casefold() == _plain(gold).casefold())
  said = _readable(text) if final is None else _box(final)
  return float(_equal_mathematics(said, gold))


def _box(text: str) -> str:
  return f'\\boxed{{{text}}}'


def _plain(text: str) -> str:
  """The text without commands that only set its type."""
  return TEXT_COMMAND.sub(r'\1', text).strip(' \n$*.')


def _readable(text: str) -> str:
  """Text outside of boxes, with numbers as Math-Verify reads them.

  Percent signs lose their backslash, and numbers with commas at other places
  than between thousands lose their commas.
  """
  text = text.replace('\\%', '%')
  return MISGROUPED.sub(lambda found: found[0].replace(',', ''), text)


def _choice(text: str, final: str | None) -> str | None:
  """The letter of a multiple choice that a completion ends with."""
  if final is not None:
    letter = CHOICE_FIRST.match(_plain(final))
    return letter[1] if letter else None
  if stated := STATED_CHOICE.findall(text):
    return stated[-1]
  lines = text.strip().splitlines()
  letter = CHOICE.fullmatch(_plain(lines[-1])) if lines else None
  return letter[1] if letter else None


def _in_words(text: str, final: str | None) -> str:
  """The words that a completion ends with."""
  if final is None:
    stated = STATED.findall(text)
    lines = text.strip().splitlines()
    final = stated[-1] if stated else lines[-1] if lines else ''
  return _plain(final)


def _equal_mathematics(text: str, gold: str) -> bool:
  """Whether the last mathematics of a text equals an answer."""
  # A process that ends late calls takes the place of their time limits, which
  # are signals that only a main thread may ask for.
  truth = _parsed_answer(gold)
  found = math_verify.parse(
    text,
    extraction_config=[
      math_verify.LatexExtractionConfig(boxed_match_priority=0),
      math_verify.ExprExtractionConfig(),
    ],
    parsing_timeout=None,
  )
  if not found:
    lines = text.strip().splitlines()
    stated = STATED.findall(text)
    last = stated[-1] if stated else lines[-1] if lines else ''
    found = math_verify.parse(_box(last.strip(' .')), parsing_timeout=None)
  if _leaves_work(found, gold):
    return False
  return math_verify.verify(truth, found, timeout_seconds=None)


def _leaves_work(found: list, gold: str) -> bool:
  """Whether a number was asked for, and an expression of numbers is said.

  Args:
    found: what Math-Verify parsed: the mathematics, and its text.
    gold: the answer.
  """
  number = final_answer.number(final_answer.STYLE.sub('', gold))
  if number is None:
    return False
  said = [x.rpartition('=')[2] for x in found if isinstance(x, str)]
  if any(UNWORKED.search(x) for x in said):
    return True
  return number.denominator == 1 and any(QUOTIENT.search(x) for x in said)


@functools.lru_cache(maxsize=1024)
def _parsed_answer(gold: str):
  """The mathematics of an answer."""
  return math_verify.parse(_box(gold), parsing_timeout=None)
