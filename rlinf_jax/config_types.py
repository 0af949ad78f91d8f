"""Checks bindings against the annotations of the parameters that they bind.

A recipe that says `STEPS = "ten"` is refused when it is read, before anything
is computed, with the file, the line, and what was expected.
"""

import ast
from collections.abc import Callable, Collection, Iterator, Mapping
import difflib
import functools
import inspect
import pydoc
import types
import typing
from typing import Any, NamedTuple

import annotated_types
import typeguard

from rlinf_jax import config_bindings

KINDS = {
  int: 'a whole number',
  float: 'a number',
  bool: 'True or False',
  str: 'a text in quotes',
  type(None): 'None',
}
BOUNDS = {
  annotated_types.Ge: ('ge', 'of at least', lambda x, bound: x >= bound),
  annotated_types.Gt: ('gt', 'above', lambda x, bound: x > bound),
  annotated_types.Le: ('le', 'of at most', lambda x, bound: x <= bound),
  annotated_types.Lt: ('lt', 'below', lambda x, bound: x < bound),
}
LONGEST = 200  # Characters of a value in a message.
# Stands for a value that a function computes when the recipe is called.
_COMPUTED = object()


class _Value(NamedTuple):
  """The value of a binding without macros.

  Attributes:
    value: the value.
    key: of the binding that sets it: the parameter's, or that of a macro.
  """

  value: Any
  key: config_bindings.Key


def check(
  bound: config_bindings.Bindings, where: Mapping[config_bindings.Key, str]
) -> list[str]:
  """The messages for bindings whose values their parameters do not take.

  Values that a function computes, and parameters without an annotation that
  can be checked, are passed over.

  Args:
    bound: all bindings of a configuration.
    where: where each binding stands, such as 'a.gin line 3'.
  """
  messages = {}  # One for a macro, however many parameters read it.
  for (scope, selector), arguments in bound.items():
    if selector == config_bindings.MACRO:
      continue
    taken = annotations(selector)
    for argument, binding in arguments.items():
      if argument not in taken:
        continue
      key = scope, selector, argument
      value, setter = _without_macros(bound, binding.value, key)
      annotation = taken[argument]
      if _COMPUTED in config_bindings.leaves(value) or accepts(
        annotation, value
      ):
        continue
      name = bound[setter[:2]][setter[2]].name
      reader = '' if setter == key else f', which `{binding.name}` reads,'
      place = f'{where[setter]}: ' if setter in where else ''
      messages.setdefault(
        setter,
        f'{place}`{name} = {_shown(value)}`{reader} must be '
        f'{described(annotation)}{_hint(annotation, value)}',
      )
  return list(messages.values())


def accepts(annotation: Any, value: Any) -> bool:
  """Whether a parameter with an annotation takes a value.

  A whole number is a number, as in typing; True and False are no numbers. A
  list may stand for a tuple.
  """
  origin = typing.get_origin(annotation)
  if origin is typing.Annotated:
    kind, *bounds = typing.get_args(annotation)
    return accepts(kind, value) and all(_within(x, value) for x in bounds)
  if origin in (typing.Union, types.UnionType):
    return any(accepts(x, value) for x in typing.get_args(annotation))
  if isinstance(value, bool) and annotation in (int, float):
    return False
  if _is_callable(annotation):  # Its parameters are the caller's to check.
    return callable(value)
  try:
    typeguard.check_type(
      value,
      annotation,
      collection_check_strategy=typeguard.CollectionCheckStrategy.ALL_ITEMS,
    )
  except typeguard.TypeCheckError:
    return False
  return True


def described(annotation: Any) -> str:
  """Describes in words the values that an annotation allows."""
  origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
  if origin is typing.Annotated:
    kind, *bounds = arguments
    limits = [
      f'{words} {getattr(x, attribute)}'
      for x in bounds
      for attribute, words, _ in [BOUNDS.get(type(x), (None, None, None))]
      if attribute
    ]
    return f'{described(kind)} {" and ".join(limits)}'.strip()
  if origin in (typing.Union, types.UnionType):
    return ' or '.join(dict.fromkeys(map(described, arguments)))
  if origin is typing.Literal:
    return 'one of ' + ', '.join(map(repr, arguments))
  if annotation in KINDS:
    return KINDS[annotation]
  if _is_callable(annotation):
    return 'a function (@name)'
  kind = origin or annotation
  if not inspect.isclass(kind):
    return str(annotation)
  if hasattr(kind, '_fields') or not issubclass(kind, Collection):
    return f'a {kind.__name__}, which a function returns (@name())'
  return 'a dictionary' if issubclass(kind, Mapping) else 'a list'


def _hint(annotation: Any, value: Any) -> str:
  """The end of a message: what was perhaps meant."""
  if isinstance(value, str):
    if (literal := _literal(annotation, value)) is not None:
      return f': leave out the quotes, {literal}.'
    choices = [x for x in _choices(annotation) if isinstance(x, str)]
    closest = difflib.get_close_matches(value, choices, 1)
    return f'; did you mean {closest[0]!r}?' if closest else '.'
  if isinstance(value, float) and _is_accepted_whole(annotation, value):
    return f': write {int(value)}.'
  if callable(value):
    return ': to call the function, add () to its name.'
  return '.'


def _literal(annotation: Any, text: str) -> str | None:
  """The value in a text as a recipe writes it; None if it is not accepted."""
  text = text.strip()
  try:
    value = ast.literal_eval(text)
  except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
    return None
  if accepts(annotation, value):
    return text
  if isinstance(value, float) and _is_accepted_whole(annotation, value):
    return str(int(value))
  return None


def _is_accepted_whole(annotation: Any, value: float) -> bool:
  """Whether a number is whole, and accepted as one; infinity is not."""
  return value.is_integer() and accepts(annotation, int(value))


def _choices(annotation: Any) -> Iterator[Any]:
  """The values that the `Literal`s of an annotation allow."""
  if typing.get_origin(annotation) is typing.Literal:
    yield from typing.get_args(annotation)
  elif typing.get_origin(annotation) in (typing.Union, types.UnionType):
    for x in typing.get_args(annotation):
      yield from _choices(x)


def _is_callable(annotation: Any) -> bool:
  origin = typing.get_origin(annotation) or annotation
  return getattr(origin, '__name__', '') == 'Callable'


def _within(bound: Any, value: Any) -> bool:
  """Whether a value keeps a bound; other annotations are no bounds."""
  if type(bound) not in BOUNDS:
    return True
  attribute, _, holds = BOUNDS[type(bound)]
  return holds(value, getattr(bound, attribute))


def _shown(value: Any) -> str:
  """A value as in a message; functions without a name, as Python shows them."""
  name = getattr(value, '__qualname__', None) if callable(value) else None
  text = f'@{name}' if name else repr(value)
  return text if len(text) <= LONGEST else f'{text[:LONGEST]}…'


def _without_macros(
  bound: config_bindings.Bindings, value: Any, key: config_bindings.Key
) -> _Value:
  """A value with those of its macros, and the key of what sets it."""
  if isinstance(value, config_bindings.Reference):
    if value.selector == config_bindings.MACRO:
      scope = value.scope
      macro = bound.get((scope, config_bindings.MACRO), {}).get('value')
      if macro is None:
        return _Value(_COMPUTED, key)
      macro_key = scope, config_bindings.MACRO, 'value'
      return _without_macros(bound, macro.value, macro_key)
    function = None if value.evaluate else _located(value.selector)
    return _Value(_COMPUTED if function is None else function, key)
  inner = lambda x: _without_macros(bound, x, key).value
  if isinstance(value, dict):
    return _Value({inner(k): inner(x) for k, x in value.items()}, key)
  if isinstance(value, list | tuple):
    return _Value(type(value)(map(inner, value)), key)
  return _Value(value, key)


@functools.cache
def _located(name: str) -> Callable | None:
  """The function or class of a full name."""
  found = pydoc.locate(name)
  return inspect.unwrap(found) if callable(found) else None


@functools.cache
def annotations(selector: str) -> dict[str, Any]:
  """The annotations of a function's parameters, or of a class's fields."""
  function = _located(selector)
  if function is None:
    return {}
  if inspect.isclass(function) and not hasattr(function, '_fields'):
    function = function.__init__
  try:
    return typing.get_type_hints(function, include_extras=True)
  # A name that only type checkers import, or an object without annotations.
  except (AttributeError, NameError, SyntaxError, TypeError):
    return {}
