"""The parameters of functions that recipes bind, and their annotations."""

from collections.abc import Callable, Iterable
import functools
import inspect
import pydoc
import typing
from typing import Any

from rlinf_jax.config import config_errors, suggestions


@functools.cache
def located(name: str) -> Callable | None:
  """The function or class of a full name."""
  found = pydoc.locate(name)
  return inspect.unwrap(found) if callable(found) else None


@functools.cache
def annotations(selector: str) -> dict[str, Any]:
  """The annotations of a function's parameters, or of a class's fields.

  Those of functions that take its `**settings` are among them.
  """
  function = located(selector)
  if function is None:
    return {}
  found = {}
  for taker in _takers(function):
    found |= _annotations(taker)
  return found | _annotations(function)


def unknown(selector: str, names: Iterable[str]) -> dict[str, str]:
  """Messages for names that reach a function's `**settings` and nothing takes.

  Functions that do not say what takes their settings are passed over: gin
  refuses names that a function without settings lacks.
  """
  function = located(selector)
  takers = _takers(function)
  taken = list(inspect.signature(function).parameters) if takers else []
  for taker in takers:
    parameters = inspect.signature(taker).parameters
    kinds = {x.kind for x in parameters.values()}
    if inspect.Parameter.VAR_KEYWORD in kinds and not _takers(taker):
      return {}  # A simulator may take settings of its own.
    taken += [k for k, x in parameters.items() if x.kind == x.KEYWORD_ONLY]
  return {
    name: f'`{selector}` has no parameter `{name}`'
    f'{suggestions.suggest(name, taken, config_errors.MOST_PARAMETERS)}'
    for name in names
    if takers and name not in taken
  }


def _takers(function: Callable | None) -> list[Callable]:
  """The functions that get a function's settings, directly or by another."""
  takers = []
  for taker in getattr(function, 'settings_takers', tuple)():
    takers += [taker, *_takers(taker)]
  return takers


def _annotations(function: Callable) -> dict[str, Any]:
  if inspect.isclass(function) and not hasattr(function, '_fields'):
    function = function.__init__
  try:
    return typing.get_type_hints(function, include_extras=True)
  # A name that only type checkers import, or an object without annotations.
  except (AttributeError, NameError, SyntaxError, TypeError):
    return {}
