"""Numbers of a recipe that must be multiples of others."""

from collections.abc import Mapping
import inspect

from rlinf_jax.config import config_bindings, config_parameters, config_types
from stages import ranges


def check(
  bound: config_bindings.Bindings, where: Mapping[config_bindings.Key, str]
) -> list[str]:
  """The messages for numbers that are no multiples, see `ranges.MultipleOf`.

  A function would refuse them only when it is called, which may be after
  simulators have started. Numbers that functions compute are passed over.

  Args:
    bound: all bindings of a configuration.
    where: where each binding stands, such as 'a.gin line 3'.
  """
  messages = []
  for scope, selector in bound:
    if selector == config_bindings.MACRO:
      continue
    if not scope and any(x and y == selector for x, y in bound):
      continue  # It may be called in the scopes alone.
    for name, annotation in config_parameters.annotations(selector).items():
      for other in getattr(annotation, '__metadata__', ()):
        if isinstance(other, ranges.MultipleOf):
          pair = name, other.name
          messages += _message(bound, where, scope, selector, pair)
  return list(dict.fromkeys(messages))  # Scopes may share both numbers.


def _message(bound, where, scope, selector, pair) -> list[str]:
  """The message of a number and that of which it must be a multiple."""
  read = config_bindings.visible(bound, scope, selector)
  function = config_parameters.located(selector)
  parameters = inspect.signature(function).parameters
  numbers, places = [], []
  for name in pair:
    value = parameters[name].default
    if name in read:
      outer, binding = read[name]
      key = outer, selector, name
      value, setter = config_types.without_macros(bound, binding.value, key)
      places += [where[setter]] if setter in where else []
    numbers.append(value)
  number, divisor = numbers
  if any(type(x) is not int or x < 1 for x in numbers) or not number % divisor:
    return []
  place = f'{", ".join(dict.fromkeys(places))}: ' if places else ''
  return [
    f'{place}`{pair[0]}` of `{selector}` is {number}, and must be a multiple '
    f'of its `{pair[1]}`, {divisor}: change one of them.'
  ]
