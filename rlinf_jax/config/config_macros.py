"""Checks that macros are set, and that no value is computed from itself."""

from collections.abc import Iterator

from rlinf_jax.config import config_bindings, suggestions

# A call: its scope and the full name of its function, or a macro.
Call = tuple[str, str]


def check(bound: config_bindings.Bindings) -> list[str]:
  """The messages for undefined macros, REQUIRED parameters and cycles.

  Args:
    bound: all bindings of a configuration.
  """
  return _undefined(bound) or _cycles(bound)


def _undefined(bound: config_bindings.Bindings) -> list[str]:
  macros = [
    scope for scope, selector in bound if selector == config_bindings.MACRO
  ]
  messages, required = [], []
  for arguments in bound.values():
    for binding in arguments.values():
      for reference in binding.references:
        name = reference.scope
        if reference.selector != config_bindings.MACRO or name in macros:
          continue
        if name == 'gin.REQUIRED':
          required.append(binding.name)
        else:
          messages.append(
            f'`{binding.name}` reads `%{name}`, which is not set'
            f'{suggestions.suggest(name, macros)}'
          )
  if required:
    messages.append(
      f'The recipe requires {suggestions.join_names(required)} to be set: '
      f'for example, add --gin.{required[0]}=...'
    )
  return messages


def _cycles(bound: config_bindings.Bindings) -> list[str]:
  """A message for a value that is needed to compute itself, if there is one."""
  finished: set[Call] = set()
  for start in bound:
    path, waiting = [start], [_needed(bound, start)]
    while waiting:
      call = next(waiting[-1], None)
      if call is None:
        finished.add(path.pop())
        waiting.pop()
      elif call in path:
        return [_cycle([_shown(x) for x in path[path.index(call) :]])]
      elif call not in finished:
        path.append(call)
        waiting.append(_needed(bound, call))
  return []


def _needed(bound: config_bindings.Bindings, call: Call) -> Iterator[Call]:
  """The calls whose results are arguments of a call."""
  scope, selector = call
  for _, binding in config_bindings.visible(bound, scope, selector).values():
    for reference in binding.references:
      if reference.evaluate:
        yield reference.scope or scope, reference.selector


def _cycle(names: list[str]) -> str:
  """The message for values that read each other in this order, in a circle."""
  if len(names) == 1:
    return f'{names[0]} reads itself: give it a value of its own.'
  return (
    f'{names[0]} reads {", which reads ".join([*names[1:], names[0]])}: give '
    'one of them a value of its own.'
  )


def _shown(call: Call) -> str:
  scope, selector = call
  is_macro = selector == config_bindings.MACRO
  return f'`{scope}`' if is_macro else f'`@{selector}()`'
