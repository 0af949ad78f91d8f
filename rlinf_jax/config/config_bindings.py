"""The bindings of a gin text as plain data, with their lines."""

from typing import Any, NamedTuple

from gin import config_parser

from rlinf_jax.config import config_errors

MACRO = 'gin.macro'


class Reference(NamedTuple):
  """`@scope/selector`, `@scope/selector()` or `%scope`, a macro."""

  scope: str
  selector: str
  evaluate: bool


class Binding(NamedTuple):
  """A binding.

  Attributes:
    name: its left-hand side.
    value: its right-hand side, with a `Reference` for each reference.
    line: number of its line.
  """

  name: str
  value: Any
  line: int

  @property
  def references(self) -> tuple[Reference, ...]:
    """The references in the value."""
    return tuple(x for x in leaves(self.value) if isinstance(x, Reference))


# Scope, full name of the function, and argument; a macro's argument is 'value'.
Key = tuple[str, str, str]
# (scope, selector) → argument → binding; a macro's argument is 'value'.
Bindings = dict[tuple[str, str], dict[str, Binding]]


class _Delegate(config_parser.ParserDelegate):
  """Parses references to plain data, with the full names of functions."""

  def __init__(self, full_name):
    self.full_name = full_name

  def configurable_reference(self, scoped_selector, evaluate):
    scope, _, selector = scoped_selector.rpartition('/')
    return Reference(scope, self.full_name(selector), evaluate)

  def macro(self, name):
    return Reference(name, MACRO, True)


def parse(text: str, header: str = '') -> Bindings:
  """Parses a gin text, without its includes.

  Args:
    text: as `gin.config_str` writes it, or that of a file.
    header: import statements that apply to it besides its own.
  """
  modules = config_errors.imported(header + text)

  def full_name(selector):
    head, dot, rest = selector.partition('.')
    return modules.get(head, head) + dot + rest

  bindings: Bindings = {}
  for statement in config_parser.ConfigParser(text, _Delegate(full_name)):
    if not isinstance(statement, config_parser.BindingStatement):
      continue
    scope, selector, argument, value, location = statement
    path = f'{scope}/{selector}' if scope else selector
    if argument:
      key, name = (scope, full_name(selector)), f'{path}.{argument}'
    else:
      key, argument, name = (path, MACRO), 'value', path
    binding = Binding(name, value, location.line_num)
    bindings.setdefault(key, {})[argument] = binding
  return bindings


def by_key(text: str, header: str = '') -> dict[Key, Binding]:
  """The bindings of a gin text, as `parse`, by scope, selector and argument."""
  return {
    (*call, argument): binding
    for call, arguments in parse(text, header).items()
    for argument, binding in arguments.items()
  }


def leaves(value: Any) -> list[Any]:
  """The value, or those in it if it is a container, as they are."""
  if isinstance(value, dict):
    return [y for x in (*value, *value.values()) for y in leaves(x)]
  if isinstance(value, list | tuple) and not isinstance(value, Reference):
    return [y for x in value for y in leaves(x)]
  return [value]


def visible(
  bound: Bindings, scope: str, selector: str
) -> dict[str, tuple[str, Binding]]:
  """The bindings of a call: argument → (scope of the binding, binding)."""
  found = {}
  parts = scope.split('/') if scope else []
  for i in range(len(parts) + 1):
    outer = '/'.join(parts[:i])
    for argument, binding in bound.get((outer, selector), {}).items():
      found[argument] = outer, binding
  return found
