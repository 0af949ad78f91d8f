"""Checks bindings against the annotations of the parameters that they bind.

A recipe that says `STEPS = "ten"` is refused when it is read, before anything
is computed, with the file, the line, and what was expected.
"""

import ast
from collections.abc import Callable, Collection, Iterator, Mapping
import dataclasses
import difflib
import inspect
import types
import typing
from typing import Any, NamedTuple

import annotated_types
import typeguard

from rlinf_jax.config import (
  config_bindings,
  config_errors,
  config_parameters,
)

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
MOST = 2**31 - 1  # The largest whole number that an int32 holds.


@dataclasses.dataclass(frozen=True)
class _Computed:
  """A value that a function computes when the recipe is called.

  Attributes:
    name: of the function.
    kind: what it returns, by its annotation; Any if it has none.
  """

  name: str
  kind: Any

  def __repr__(self):
    return f'@{self.name}()'


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

  Of a value that a function computes, the annotation of what it returns is
  compared. Parameters without an annotation that can be checked are passed
  over.

  Args:
    bound: all bindings of a configuration.
    where: where each binding stands, such as 'a.gin line 3'.
  """
  messages = {}  # One for a macro, however many parameters read it.
  for (scope, selector), arguments in bound.items():
    if selector == config_bindings.MACRO:
      continue
    taken = config_parameters.annotations(selector)
    unknown = config_parameters.unknown(selector, arguments)
    for argument, binding in arguments.items():
      key = scope, selector, argument
      if argument in unknown:
        place = f'{where[key]}: ' if key in where else ''
        messages[key] = f'{place}{unknown[argument]}'
      if argument not in taken:
        continue
      value, setter = without_macros(bound, binding.value, key)
      annotation = taken[argument]
      if _is_taken(annotation, value):
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


def _is_taken(annotation: Any, value: Any) -> bool:
  """Whether a parameter takes a value, which functions may yet compute."""
  if isinstance(value, _Computed):
    return fits(annotation, value.kind)
  if any(isinstance(x, _Computed) for x in config_bindings.leaves(value)):
    return True
  return accepts(annotation, value)


def fits(annotation: Any, kind: Any) -> bool:
  """Whether a parameter may take what a function with this annotation returns.

  What cannot be told from the annotations is assumed to fit.
  """
  if typing.get_origin(annotation) is typing.Annotated:
    return fits(typing.get_args(annotation)[0], kind)
  if typing.get_origin(annotation) in (typing.Union, types.UnionType):
    return any(fits(x, kind) for x in typing.get_args(annotation))
  kinds = [kind]
  if typing.get_origin(kind) in (typing.Union, types.UnionType):
    kinds = typing.get_args(kind)
  return any(_one_fits(annotation, x) for x in kinds)


def _one_fits(annotation: Any, kind: Any) -> bool:
  if Any in (annotation, kind):
    return True
  if _is_callable(annotation):
    return not inspect.isclass(kind) or issubclass(kind, Callable)
  wanted = typing.get_origin(annotation) or annotation
  got = typing.get_origin(kind) or kind
  if not inspect.isclass(wanted) or not inspect.isclass(got):
    return True
  # Types of array libraries answer `issubclass` in their own way, and protocols
  # do not answer it.
  if 'jaxtyping' in (wanted.__module__, got.__module__):
    return True
  if any(getattr(x, '_is_protocol', False) for x in (wanted, got)):
    return True
  is_one = issubclass(got, wanted) or issubclass(wanted, got)
  return is_one or (wanted is float and got is int)


def accepts(annotation: Any, value: Any) -> bool:
  """Whether a parameter with an annotation takes a value.

  A whole number is a number, as in typing; True and False are no numbers. A
  list is no tuple.
  """
  origin = typing.get_origin(annotation)
  if origin is typing.Annotated:
    kind, *bounds = typing.get_args(annotation)
    return accepts(kind, value) and all(_within(x, value) for x in bounds)
  if origin in (typing.Union, types.UnionType):
    return any(accepts(x, value) for x in typing.get_args(annotation))
  if isinstance(value, bool) and annotation in (int, float):
    return False
  if _is_too_large(annotation, value):
    return False
  if _is_callable(annotation):
    return (
      callable(value)
      and not _missing(annotation, value)
      and fits(_result(annotation), _returns(value))
    )
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
    article = 'an' if kind.__name__[0] in 'AEIO' else 'a'
    return f'{article} {kind.__name__}, which a function returns (@name())'
  if issubclass(kind, tuple):
    # A tuple of one is often written without its comma.
    each = f', of {described(arguments[0])}' if arguments[1:] == (...,) else ''
    return f'a tuple, (x,) or (x, y){each}'
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
  if isinstance(value, int) and abs(value) > MOST:
    return f', and at most {MOST}.'
  if missing := _missing(annotation, value):
    names = ' and no '.join(f'`{name}`' for name in missing)
    return f', and `{_name(value)}` takes no {names}.'
  returned = value.kind if isinstance(value, _Computed) else _returns(value)
  if (
    inspect.isclass(returned)
    and returned is not Any
    and (isinstance(value, _Computed) or _is_callable(annotation))
  ):
    return f', and the function returns {returned.__name__}.'
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
  return getattr(origin, '__name__', '') == 'Callable' or _is_call(origin)


def _is_call(annotation: Any) -> bool:
  """Whether an annotation is a protocol of functions, by their parameters."""
  return getattr(annotation, '_is_protocol', False) and (
    '__call__' in vars(annotation)
  )


def _missing(annotation: Any, value: Any) -> list[str]:
  """The parameters that a function lacks and a protocol passes by name.

  The parameters of a plain `Callable` are the caller's to check.
  """
  if typing.get_origin(annotation) in (typing.Union, types.UnionType):
    lacking = [_missing(x, value) for x in typing.get_args(annotation)]
    return next(filter(None, lacking), [])
  if not _is_call(annotation) or not callable(value):
    return []
  try:
    taken = inspect.signature(value).parameters
  except (ValueError, TypeError):  # Some of those written in C have none.
    return []
  if any(x.kind == x.VAR_KEYWORD for x in taken.values()):
    return []
  _, *passed = inspect.signature(annotation.__call__).parameters
  return [name for name in passed if name not in taken]


def _is_too_large(annotation: Any, value: Any) -> bool:
  """Whether a number is larger than what arrays hold."""
  if not isinstance(value, int):
    return False
  return (
    annotation is int
    and not -MOST - 1 <= value <= MOST
    or (annotation is float and abs(value) > 1e308)
  )


def _result(annotation: Any) -> Any:
  """The result of functions that an annotation allows; Any if unused."""
  if _is_call(annotation):
    result = _returns(annotation.__call__)
  else:
    result = (typing.get_args(annotation) or [Any])[-1]
  return Any if result in (None, type(None)) else result


def _returns(value: Any) -> Any:
  """The annotated result of a function; of a class, the class."""
  if inspect.isclass(value):
    return value
  try:
    return typing.get_type_hints(value).get('return', Any)
  except (AttributeError, NameError, SyntaxError, TypeError):
    return Any


def _within(bound: Any, value: Any) -> bool:
  """Whether a value keeps a bound; other annotations are no bounds."""
  if type(bound) not in BOUNDS:
    return True
  attribute, _, holds = BOUNDS[type(bound)]
  return holds(value, getattr(bound, attribute))


def _shown(value: Any) -> str:
  """A value as in a message; functions without a name, as Python shows them."""
  name = _name(value)
  text = f'@{name}' if name else repr(value)
  return config_errors.cut(text)


def _name(value: Any) -> str | None:
  """The name of a function or class; None if it has none."""
  return getattr(value, '__qualname__', None) if callable(value) else None


def without_macros(
  bound: config_bindings.Bindings, value: Any, key: config_bindings.Key
) -> _Value:
  """A value with those of its macros, and the key of what sets it."""
  if isinstance(value, config_bindings.Reference):
    if value.selector == config_bindings.MACRO:
      scope = value.scope
      macro = bound.get((scope, config_bindings.MACRO), {}).get('value')
      if macro is None:
        return _Value(_Computed(scope, Any), key)
      macro_key = scope, config_bindings.MACRO, 'value'
      return without_macros(bound, macro.value, macro_key)
    function, name = (
      config_parameters.located(value.selector),
      value.selector.split('.')[-1],
    )
    if function is None or value.evaluate:
      return _Value(_Computed(name, _returns(function)), key)
    return _Value(function, key)
  inner = lambda x: without_macros(bound, x, key).value
  if isinstance(value, dict):
    return _Value({inner(k): inner(x) for k, x in value.items()}, key)
  if isinstance(value, list | tuple):
    return _Value(type(value)(map(inner, value)), key)
  return _Value(value, key)
