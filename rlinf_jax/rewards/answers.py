"""Whether a completion's final answer is right.

Numbers are read by `plain_numbers`. Other answers are compared as mathematics
by `math-verify`: {1,2} is {2,1}. Run it in `pool.isolated`: what it parses may
take any time and any memory.
"""

import functools
import re

import math_verify
import sympy

from rlinf_jax.rewards import base, final_answer, plain_numbers

CHOICE = re.compile(r'\(?([A-J])\)?[.:]?')
# The last of these is the choice of a completion without a box. The words A and
# I are no choices, nor is `option B is wrong`.
STATED_CHOICE = re.compile(
  r'\b(?i:answer|choice|option|choose|pick|select)\s{0,4}'
  r'(?i:is|would be|should be)?:?\s{0,4}'
  r'(?i:(?:i (?:think|choose|pick)|option)\s{1,4})?'
  r'[*(]{0,4}([A-J])(?![\w\'’])(?!\s+(?:is|are|was|does)\b)'
  r'(?:(?<![AI])|(?=\s*(?:[).,:;!?*]|$|(?:because|or|and)\b)))(?=(.{0,16}))',
  re.M,
)
# After a choice, another one.
OTHER_CHOICE = re.compile(
  r'(?:\b(?:or|and)|[,/&])\s+\(?[A-J](?![\w\'’])|[,/&(][A-J](?![\w\'’])'
)
WORDS = re.compile(r'[^\W\d_]{2,}(?:[ -][^\W\d_]+)*')
STATED = re.compile(r'(?:answer|result)\s*(?:is|:|=)\s*(.+)', re.I)
# Math-Verify would read the beginning of these as a number: 2,125 of 2,1251.
# Not in brackets, where commas separate.
MISGROUPED = re.compile(r'(?<![\d(\[{,.])\d{1,3}(?:,\d{3})+\d+')
# A longer line states no answer, and would take seconds to parse.
MAX_LINE = 200
_PERCENT = sympy.UnevaluatedExpr(sympy.Rational(1, 100))


def correct(completion: base.Completion) -> float:
  """1 if the final answer of a completion is its answer, else 0.

  The final answer is what follows `####`, or is in `\\boxed{}`, or is stated
  last. An answer of one letter (A … J) is a multiple choice, and an answer in
  words is compared letter by letter. Where the answer is a number, a completion
  must state a plain number (`plain_numbers.read`): 51 - 28 is not 23, or a
  model would learn to leave the work to this function. All other answers are
  compared as mathematics.
  """
  gold = final_answer.unboxed(completion.answer).strip().strip('$').strip()
  text = completion.text[-final_answer.MAX_CHARACTERS :]
  plain = plain_numbers.plain(gold).rstrip('.')
  if choice := CHOICE.fullmatch(plain):
    return float(_choice(text) == choice[1])
  if WORDS.fullmatch(plain):
    return float(_in_words(text).casefold() == plain.casefold())
  number = plain_numbers.read(gold)
  if number and not number.unit:
    said = _number(text)
    return float(said is not None and number.equals(said))
  return float(_equal_mathematics(text, gold))


def _choice(text: str) -> str | None:
  """The letter of a multiple choice that a completion ends with."""
  final = final_answer.find(text)
  if final is not None:
    final = plain_numbers.plain(final)
    if letter := _leading_choice(final[:2].upper() + final[2:]):
      return letter
  plain = plain_numbers.plain(text) if final is None else final
  if stated := STATED_CHOICE.findall(plain):
    letter, rest = stated[-1]
    return None if OTHER_CHOICE.search(rest) else letter
  return _leading_choice(_last_line(plain)) if final is None else None


def _leading_choice(text: str) -> str | None:
  """The choice that a line begins with: `C`, `(C) 12`; None for two."""
  text = plain_numbers.plain(text)
  letter = final_answer.CHOICE.match(text)
  if not letter:
    return None
  rest = text[letter.end() :]
  if final_answer.CHOICE.match(rest) or OTHER_CHOICE.search(rest):
    return None
  return letter[1]


def _in_words(text: str) -> str:
  """The words that a completion ends with."""
  final = final_answer.find(text, words=True)
  return plain_numbers.plain(_stated(text) if final is None else final).strip(
    ' .'
  )


def _number(text: str) -> plain_numbers.Number | None:
  """The number that a completion ends with; None if it is no plain number."""
  final = final_answer.find(text)
  if final is not None:
    return plain_numbers.read(final)
  # Math-Verify would read the 1 of 1e3, or a product with Euler's number.
  text = plain_numbers.without_exponents(text)
  found = _mathematics(text.replace('\u2212', '-'))
  if not found:
    return plain_numbers.read(_stated(text))
  value, said = found[0], found[-1]  # Or the text alone, unread.
  # Math-Verify leaves the sign of 50 % out of its text.
  if _PERCENT in getattr(value, 'args', ()):
    said = said.rstrip('%') + '%'
  return plain_numbers.read(said)


def _equal_mathematics(text: str, gold: str) -> bool:
  """Whether the last mathematics of a text equals an answer."""
  final = final_answer.find(text)
  found = _mathematics(text) if final is None else _parsed(final)
  if not found and len(last := _stated(text).strip(' .')) <= MAX_LINE:
    found = _parsed(last)
  return math_verify.verify(_parsed_answer(gold), found, timeout_seconds=None)


def _mathematics(text: str) -> list:
  """The last mathematics outside of boxes that Math-Verify finds, and its text.

  Percent signs lose their backslash, and numbers with commas at other places
  than between thousands lose their commas.
  """
  text = text.replace('\\%', '%')
  text = MISGROUPED.sub(lambda found: found[0].replace(',', ''), text)
  # A process that ends late calls takes the place of Math-Verify's time limits,
  # which are signals that only a main thread may ask for.
  return math_verify.parse(
    text,
    extraction_config=[
      math_verify.LatexExtractionConfig(boxed_match_priority=0),
      math_verify.ExprExtractionConfig(),
    ],
    parsing_timeout=None,
  )


def _stated(text: str) -> str:
  """The answer that a text states, or else its last line."""
  stated = STATED.findall(text)
  return stated[-1] if stated else _last_line(text)


def _last_line(text: str) -> str:
  lines = text.strip().splitlines()
  return lines[-1] if lines else ''


def _parsed(text: str) -> list:
  """The mathematics of a text."""
  return math_verify.parse(f'\\boxed{{{text}}}', parsing_timeout=None)


_parsed_answer = functools.lru_cache(maxsize=1024)(_parsed)
