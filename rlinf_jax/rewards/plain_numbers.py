r"""Numbers as a completion writes them: `18`, `\$1{,}234.50`, `x = 18 cm`.

They are read, not computed: `51 - 28`, `5!` and `\sqrt{529}` are no plain
numbers.
"""

import decimal
import fractions
import re
from typing import NamedTuple

# A statement of one number is short. The limit bounds the time of a call.
MAX_CHARACTERS = 200

_TEXT_COMMAND = re.compile(
  r'\\(?:text(?:bf|it|rm)?|math(?:bf|rm)|mbox)\s*{([^{}]*)}'
)
_SPACE = re.compile(
  r'\\(?:[,;: ()[\]]|q?quad(?![a-zA-Z]))|\\?\$|[~\u00a0\u2009\u202f]'
)
_NOTHING = re.compile(r'\\!|\\(?:left|right)(?![a-zA-Z])|`')
# *18* and **18**, but not the products of 2*18*3.
_EMPHASIS = re.compile(r'(?<![\w*)}\]])(\*{1,3})(?=\S)([^*\n]+)\1(?![\w*({\\])')
_FRACTION = re.compile(
  r'\\[dt]?frac\s*(?:{([+-]?[0-9]{1,40})}|([0-9]))\s*'
  r'(?:{([0-9]{1,40})}|([0-9]))'
)
_NEGATIVE = re.compile(r'\b(?:minus|negative)\s+(?=[0-9.])', re.I)
_UNIT_POWER = re.compile(r'(?<=[a-zA-Z])\s*(?:\^\s*(?:[23]|{[23]})|[²³])')
_EXPONENT = re.compile(
  r'(?<![\w.,])[0-9]{1,20}(?:\.[0-9]{1,20})?[eE][+-]?[0-9]{1,2}'
  r'(?![\w]|[.,][0-9])'
)
_CURRENCY = re.compile('[€£¥₹]')

_LETTER = r'[^\W\d_]'
_WORDS = rf"(?<={_LETTER})[-'’/](?={_LETTER})|{_LETTER}"
_DECIMAL = (
  r'(?:(?:[0-9]{1,3}(?:[, ][0-9]{3})+(?![0-9])|[0-9]{1,40}(?:,[0-9]{3,40})*)'
  r'(?:\.[0-9]{1,40})?|\.[0-9]{1,40})'
)
_STATEMENT = re.compile(
  # Words, as in `The answer is 18`, but no name that multiplies the number.
  rf"""(?P<lead>\s*['"]?|(?:{_WORDS}|[\s,;:"']|\.(?=\s))*"""
  rf"""(?:{_LETTER}{{2}}[,.]?\s+|:\s*)["']?)"""
  r'(?:(?P<round>\()|(?P<square>\[))?\s*(?P<sign>[+-]?)\s*(?:'
  rf'(?:(?P<factor>{_DECIMAL})\s*(?:\\times|\\cdot|[×·*x])\s*)?'
  r'10\s*(?:\^|\*\*)\s*(?P<brace>{)?(?P<power>-?[0-9]{1,2})(?(brace)})'
  r'|(?:(?P<whole>[0-9]{1,40})\s+(?=[1-9]))?'
  r'(?P<top>[0-9]{1,40})\s*/\s*(?P<bottom>[0-9]{1,40})'
  rf'|(?P<decimal>{_DECIMAL}))'
  r"""(?P<percent>\s*(?:\\?%|percent\b))?["']?"""
  r'(?(round)\s*\))(?(square)\s*\])'
  # A single letter is a unit if it is not often a variable.
  r'(?P<unit>\s*(?:°|¢|\^\s*(?:\\circ|{\\circ})|\\degree)?'
  rf'(?:(?:\s*|\s\()(?:{_LETTER}{{2}}|[A-Zdghlms](?!{_LETTER}))'
  rf"""(?:{_WORDS}|[\s.,;:"'()])*)?)\.?\s*"""
)
_SAYS = re.compile(r'(?:\b(?:is|are|was|be|equals)|:)\s*$', re.I)
_ABOUT = re.compile(r'≈|\\approx(?![a-zA-Z])')


class Number(NamedTuple):
  """A number as it is written.

  Attributes:
    value: of 50 %, 50.
    percent: whether a percent sign follows.
    quotient: whether it is written as a fraction, such as 6/2.
    stated: whether it begins the text, or the words before it say that it
      follows: `The answer is 18`.
    unit: the words after it.
  """

  value: fractions.Fraction
  percent: bool
  quotient: bool
  stated: bool
  unit: str

  def equals(self, said: 'Number') -> bool:
    """Whether an answer that was said is this one.

    A fraction is no whole number, as it is left to be divided. Percent count
    as written and as hundredths, and other than whole numbers to six decimals.
    """
    value = self.value
    whole = value.denominator == 1 and not self.quotient
    if whole and said.quotient:
      return False
    return any(
      a == b or (a.denominator > 1 and round(a, 6) == round(b, 6))
      for a in self._values()
      for b in said._values()
    )

  def _values(self) -> list[fractions.Fraction]:
    return [self.value, self.value / 100] if self.percent else [self.value]


def plain(text: str) -> str:
  r"""The text without what only sets its type.

  These are markdown, `$`, `\text{}` and spaces of LaTeX. A minus sign becomes
  a hyphen, and `{,}` a comma.
  """
  text = text.replace('\u2212', '-').replace('{,}', ',').replace('\\%', '%')
  text = _TEXT_COMMAND.sub(r'\1', text)
  text = _SPACE.sub(' ', _NOTHING.sub('', text))
  return _EMPHASIS.sub(r'\2', text).strip(' \t\n\r*"“”')


def without_exponents(text: str) -> str:
  """The text with numbers such as `1.5e3` written out, as 1500."""
  return _EXPONENT.sub(lambda x: f'{decimal.Decimal(x[0]):f}', text)


def read(text: str) -> Number | None:
  r"""The one number that an answer states; None if it is not a plain number.

  Words may come before and after it, such as `x =`, units, and `The answer
  is`. It is a whole number, a decimal, a fraction or a mixed number, or has a
  power of ten, as in `1e3`. Thousands may be grouped by commas or spaces. It
  may be in brackets.
  """
  if len(text) > MAX_CHARACTERS:
    return None
  *rounded, exact = _ABOUT.split(plain(without_exponents(text)))
  sides = exact.split('=')
  number = _side(sides[-1])
  if number is None:
    return None
  # 22 = 23 and `22, x = 23` state two numbers, but 22.5 ≈ 23 states one.
  for other in _stated(sides[:-1]):
    if not other.quotient and not other.equals(number):
      return None
  for other in _stated(rounded):
    if abs(other.value - number.value) >= 1:
      return None
  return number._replace(
    stated=number.stated or bool(rounded) or len(sides) > 1
  )


def _stated(sides: list[str]) -> list[Number]:
  """The numbers that are all there is of a side, or of an item of one."""
  items = (_side(x) for side in sides for x in re.split(r'[,;]\s', side))
  return [number for number in items if number and number.stated]


def _side(text: str) -> Number | None:
  """The number on one side of an equation."""
  text = _FRACTION.sub(
    lambda x: f' {x[1] or x[2]}/{x[3] or x[4]}', _CURRENCY.sub(' ', text)
  )
  text = _UNIT_POWER.sub('', _NEGATIVE.sub('-', text))
  found = _STATEMENT.fullmatch(text)
  if not found or _has_numerals(found['lead'] + found['unit']):
    return None
  stated = not found['lead'].strip(' "\'') or bool(_SAYS.search(found['lead']))
  bracket = found['round'] or found['square']
  # (1,234) is a pair.
  if bracket and ',' in (found['factor'] or found['decimal'] or ''):
    return None
  # In other words than `is -5`, the sign is that of a difference, and what is
  # in brackets the argument of a function.
  value = _value(found)
  if value is None or ((found['sign'] or bracket) and not stated):
    return None
  if found['sign'] == '-':
    value = -value
  return Number(
    value,
    bool(found['percent']),
    bool(found['top']),
    stated,
    found['unit'].strip(' .'),
  )


def _value(found: re.Match) -> fractions.Fraction | None:
  """The value of a number without its sign; None for a quotient of 0."""
  if found['power']:
    factor = fractions.Fraction(_ungrouped(found['factor'] or '1'))
    return factor * fractions.Fraction(10) ** int(found['power'])
  if found['decimal']:
    return fractions.Fraction(_ungrouped(found['decimal']))
  top, bottom = int(found['top']), int(found['bottom'])
  if bottom == 0 or (found['whole'] and top >= bottom):
    return None
  return int(found['whole'] or 0) + fractions.Fraction(top, bottom)


def _ungrouped(decimal: str) -> str:
  return decimal.replace(',', '').replace(' ', '')


def _has_numerals(text: str) -> bool:
  """Whether words have numerals, such as those of 2¹⁰."""
  return any(x.isnumeric() for x in text)
