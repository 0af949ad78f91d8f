r"""Final answers: in `\boxed{}`, after `####`, or a last number."""

import fractions
import re

# An answer is at the end; the text before only costs time.
MAX_CHARACTERS = 10_000
MARKER = '####'  # Of the final line in GSM8K.
NUMBER = re.compile(r'-?\d[\d,]*(?:\.\d+)?(?:/\d+)?')
# Differences that do not make answers differ.
STYLE = re.compile(r'\\(?:left|right|,|;|!)|[\s$]|(?<=\d),(?=\d{3}(?!\d))|\.$')

# A whole number, a decimal or a fraction, in LaTeX too, after `STYLE`. It is
# short, so that no text takes long to read.
PLAIN_NUMBER = re.compile(
  r'(?P<sign>[+-]?)(?:\\[dt]?frac{(?P<top>\d{1,40})}{(?P<bottom>\d{1,40})}'
  r'|(?P<number>\d{1,40}(?:/\d{1,40})?|\d{0,40}\.\d{1,40}))'
)


def in_box(text: str) -> str | None:
  r"""The content of the last `\boxed{…}`; None if there is none that closes."""
  box, depth = text.rfind('\\boxed'), 0
  start = -1 if box < 0 else text.find('{', box)
  if start < 0:
    return None
  for i in range(start, len(text)):
    depth += (text[i] == '{') - (text[i] == '}')
    if depth == 0:
      return text[start + 1 : i]
  return None


def unboxed(text: str) -> str:
  """The content of the last box, or the text if it has none."""
  inside = in_box(text)
  return text if inside is None else inside


def find(text: str) -> str | None:
  """The text after the last marker or in the last box; None without both."""
  marker, box = text.rfind(MARKER), text.rfind('\\boxed')
  if marker > box:
    line = text[marker + len(MARKER) :].strip().partition('\n')[0].strip()
    return unboxed(line)
  return in_box(text)


def vote(text: str) -> str | None:
  """The vote of a completion: its final answer, or else its last number.

  Answers are compared as text, but for spaces, dollars, capital letters, the
  commas of thousands, and the ways to write a number: 0.50 is 1/2. None if
  there is neither.
  """
  text = text[-MAX_CHARACTERS:]
  answer = find(text)
  if answer is None:
    answer = (NUMBER.findall(text) or [None])[-1]
  if answer is None:
    return None
  answer = STYLE.sub('', answer).casefold()
  value = number(answer)
  return answer if value is None else str(value)


def number(text: str) -> fractions.Fraction | None:
  """The number that an answer is, without working it out; None if it is none.

  Args:
    text: an answer without the differences of `STYLE`.
  """
  found = PLAIN_NUMBER.fullmatch(text)
  if not found:
    return None
  plain = found['number'] or f'{found["top"]}/{found["bottom"]}'
  try:
    return fractions.Fraction(found['sign'] + plain)
  except ZeroDivisionError:
    return None
