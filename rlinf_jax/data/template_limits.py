"""Limits of size for what a chat template makes.

Most of it is computed outside Python, where no limit of time ends it: an
operator, a filter or a method is refused before it makes a text or a list that
is too long, by a bound of its length. Texts and lists that grow step by step
are refused when one is too long.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import functools
import re
from typing import Any

from jinja2 import compiler, sandbox
from jinja2 import utils as jinja_utils

LONGEST = 1 << 24  # Characters of a text, or entries of a list.
MAX_BITS = 1 << 16  # Of a whole number that is computed.

# Filters and methods whose result is as long as a number that they are given.
_PADS = frozenset(
  ('center', 'ljust', 'rjust', 'zfill', 'to_bytes', 'batch', 'slice', 'round')
)
# Filters and methods that may repeat another argument, or a number of spaces,
# at each character of the first.
_REPEATS = frozenset(
  ('expandtabs', 'indent', 'lipsum', 'tojson', 'translate', 'urlize')
)


class Environment(sandbox.ImmutableSandboxedEnvironment):
  """A sandbox of Jinja with limits of size."""

  intercepted_binops = frozenset(['+', '*', '**', '%'])

  def __init__(self, *args, **kwargs):
    super().__init__(*args, **{'finalize': _checked} | kwargs)
    self.filters = _Filters(self.filters)

  def call_binop(self, context, operator, left, right):
    _check_operator(operator, left, right)
    return super().call_binop(context, operator, left, right)

  def call(self, context, function, *args, **kwargs):
    name = getattr(function, '__name__', '')
    if name == 'join':  # Counted before they are joined.
      args = [[*x] if isinstance(x, Iterator) else x for x in args]
    # Jinja wraps `str.format`.
    method = getattr(function, '__wrapped__', function)
    owner = getattr(method, '__self__', None)
    _check_call(name, args if owner is None else (owner, *args), kwargs)
    return _checked(super().call(context, function, *args, **kwargs))

  @staticmethod
  def concat(texts: Iterator[str]) -> str:
    """Joins texts, as those of a block or of the whole template."""
    parts, length = [], 0
    for text in texts:
      parts.append(text)
      length += len(text)
      _check_length('a block', length)
    return ''.join(parts)

  @staticmethod
  def join_texts(values: Sequence[Any]) -> str:
    """Joins values by `~`."""
    _check_length('~', sum(map(size, values)))
    return ''.join(map(str, values))


class _CodeGenerator(compiler.CodeGenerator):
  """Compiles `~` to a call of the environment."""

  def visit_Concat(self, node, frame):
    self.write('environment.join_texts((')
    for part in node.nodes:
      self.visit(part, frame)
      self.write(', ')
    self.write('))')


Environment.code_generator_class = _CodeGenerator


class _Filters(dict):
  """Filters with limits, also those that are added later."""

  def __init__(self, filters: Mapping[str, Callable]):
    super().__init__()
    for name, function in filters.items():
      self[name] = function

  def __setitem__(self, name: str, function: Callable):
    skipped = int(hasattr(function, 'jinja_pass_arg'))  # Such as a context.

    @functools.wraps(function)
    def limited(*args, **kwargs):
      own, values = list(args[:skipped]), list(args[skipped:])
      if name == 'join' and values and isinstance(values[0], Iterator):
        values[0] = list(values[0])
      _check_call(name, values, kwargs)
      return _checked(function(*own, *values, **kwargs))

    super().__setitem__(name, limited)


def size(x: Any, known: dict[int, int] | None = None) -> int:
  """A bound of the characters of a value as text, to within some a value.

  A list that holds another twice counts it twice, and is visited once.
  """
  if isinstance(x, str | bytes | bytearray):
    return len(x)
  if isinstance(x, int):
    return x.bit_length() // 3 + 1
  if isinstance(x, jinja_utils.Namespace):
    x = object.__getattribute__(x, '_Namespace__attrs')
  if isinstance(x, Mapping):
    entries = [*x.keys(), *x.values()]
  elif isinstance(x, list | tuple | set | frozenset):
    entries = x
  else:
    return 1
  known = {} if known is None else known
  if id(x) not in known:
    # Looked up here: most entries of a list that was doubled are the same ones.
    known[id(x)] = 1 + sum(
      known[id(entry)] if id(entry) in known else size(entry, known)
      for entry in entries
    )
  return known[id(x)]


def _check_operator(operator: str, left: Any, right: Any):
  """Raises a ValueError if the result of an operator would be too large."""
  if operator == '%' and isinstance(left, str | bytes):
    _check_length(operator, _formatted(left, (right,)))
  elif operator == '+' and hasattr(left, '__len__'):
    _check_length(operator, size(left) + size(right))
  elif operator in ('*', '**'):
    _check_product(operator, left, right)


def _check_product(operator: str, left: Any, right: Any):
  if isinstance(left, int) and isinstance(right, int):
    bits = abs(left).bit_length()
    bits = bits * right if operator == '**' else bits + right.bit_length()
    if bits > MAX_BITS:
      raise ValueError(f'{operator} makes a number of over {MAX_BITS:,} bits')
  for x, times in ((left, right), (right, left)):
    repeats = (
      operator == '*' and isinstance(times, int) and hasattr(x, '__len__')
    )
    if repeats:
      _check_length(operator, len(x) * times)


def _check_call(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]):
  """Raises a ValueError if a filter or a method would make too much.

  Args:
    name: of the filter or method.
    args: its arguments, after the value that it is applied to.
    kwargs: those with names.
  """
  if not args:
    return
  value, *rest = args
  rest += kwargs.values()
  _check_length(name, sum(map(size, (value, *rest))))
  numbers = [abs(x) for x in rest if isinstance(x, int)]
  if name in _PADS:
    _check_length(name, max(numbers, default=0))
  elif name in _REPEATS:
    texts = (size(x) for x in rest if not isinstance(x, int))
    _check_length(name, size(value) * (sum(numbers) + sum(texts)))
  elif name == 'wordwrap':
    breaks = sum(len(x) for x in rest if isinstance(x, str))
    width = max(1, min(numbers, default=79))
    lines = size(value) // width + str(value).count('\n') + 1
    _check_length(name, lines * breaks)
  elif name in ('format', 'format_map'):
    _check_length(name, _formatted(str(value), rest))
  elif name == 'join' and rest:
    _check_length(name, _joined(value, rest[0]))
  elif name == 'replace' and len(rest) > 1:
    old, new = map(str, rest[:2])
    _check_length(name, str(value).count(old) * len(new))


def _joined(one: Any, other: Any) -> int:
  """Length of the entries of one argument, with the other between them."""
  if isinstance(one, str) and isinstance(other, str):
    return (len(one) + 1) * (len(other) + 1)
  entries, between = (other, one) if isinstance(one, str) else (one, other)
  count = len(entries) if hasattr(entries, '__len__') else 0
  return size(entries) + count * size(between)


def _formatted(text: str, args: Any) -> int:
  """A bound of the length of a text that is formatted by `%` or `format`."""
  widths = re.findall(r'%(?:\([^)]*\))?[-+ #0]*(\d*)(?:\.(\d*))?', text)
  specs = re.findall(r'\{[^{}]*:([^{}]*)', text)
  widths += [re.findall(r'\d+', spec) for spec in specs]
  fields = text.count('%') + text.count('{')
  each = size(args)
  if '*' in text or re.search(r':[^{}]*\{', text):  # A width is an argument.
    each += sum(_numbers(args))
  return (
    len(text) + fields * each + sum(int(x) for row in widths for x in row if x)
  )


def _numbers(args: Any) -> Iterator[int]:
  """Yields the sizes of all whole numbers among arguments."""
  if isinstance(args, int):
    yield abs(args)
  elif isinstance(args, Mapping):
    yield from _numbers([*args.values()])
  elif isinstance(args, list | tuple):
    for x in args:
      yield from _numbers(x)


def _checked(x: Any) -> Any:
  """A value, if it is not too long."""
  _check_length('it', size(x))
  return x


def _check_length(name: str, length: int):
  if length > LONGEST:
    raise ValueError(
      f'{name or "a call"} makes a text or a list of over {LONGEST:,} entries'
    )
