r"""Final answers: in `\boxed{}`, after `####`, or a last number."""

import re

from rlinf_jax.rewards import plain_numbers

# An answer is at the end; the text before only costs time.
MAX_CHARACTERS = 10_000
MARKER = '####'  # Of the final line in GSM8K, and of headings in markdown.
NUMBER = re.compile(r'(?:(?<![\d)])-)?\d[\d,]*(?:\.\d+)?(?:/\d+)?')
# Differences that do not make answers differ.
STYLE = re.compile(r'\s|(?<=\d),(?=\d{3}(?!\d))|\.$')
# The letter of a multiple choice, alone or before the text of that choice.
CHOICE = re.compile(r'\(?([A-J])(?:\)[.:]?|[.:]|$)\s*')
PROSE = re.compile(r'(?<![\\a-zA-Z])[a-zA-Z]{3}')


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


def find(text: str, *, words: bool = False) -> str | None:
  """The text after the last marker or in the last box; None without both.

  The marker is that of a heading in markdown, too. The text on its line is the
  final answer if it is a number, a choice, a box or mathematics. If not, the
  box before it is; without a box, the next line, if that is one of these.
  Otherwise the line is the final answer only if nothing follows it.

  Args:
    text: of a completion.
    words: whether the answer is in words. A line of words without a box is then
      the final answer, even if another line follows.
  """
  marker, box = text.rfind(MARKER), text.rfind('\\boxed')
  if marker <= box:
    return in_box(text)
  lines = text[marker + len(MARKER) :].strip().splitlines()
  lines = [line.strip() for line in lines if line.strip()]
  line = lines[0] if lines else ''
  if lines and _is_answer(line):
    return unboxed(line)
  if (inside := in_box(text)) is not None:
    return inside
  if len(lines) > 1 and _is_answer(lines[1]):
    return lines[1]
  return line if words or len(lines) < 2 else None


def _is_answer(line: str) -> bool:
  """Whether a line is a final answer, and no heading or other prose."""
  text = plain_numbers.plain(line)
  number = plain_numbers.read(line)
  return bool(
    (number and number.stated)
    or in_box(line) is not None
    or not PROSE.search(text)
    or CHOICE.match(text)
  )


def vote(text: str) -> str | None:
  """The vote of a completion: its final answer, or else its last number.

  Answers are compared as text, but for markdown, spaces, dollars, capital
  letters, the commas of thousands, and the ways to write a number: 0.50 is 1/2.
  None if there is neither.
  """
  text = text[-MAX_CHARACTERS:].replace('\u2212', '-')
  text = plain_numbers.without_exponents(text)
  answer = find(text)
  if answer is None:
    answer = (NUMBER.findall(text) or [None])[-1]
  if answer is None:
    return None
  number = plain_numbers.read(answer)
  if number and not number.unit and not number.percent:
    return str(number.value)
  return STYLE.sub('', plain_numbers.plain(answer)).casefold()
