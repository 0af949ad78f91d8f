"""Values of the parameters that the recipe's functions were called with."""

from typing import Any, NamedTuple

import gin
from gin import config_parser


class _Macro(NamedTuple):
  """`%name`."""

  name: str


class _Unknown(NamedTuple):
  """A reference to a function, whose value is not a literal."""


class _Delegate(config_parser.ParserDelegate):
  """Parses references to plain data."""

  def configurable_reference(self, scoped_selector, evaluate):
    return _Unknown()

  def macro(self, name):
    return _Macro(name)


def read(parameter: str) -> dict[str, Any]:
  """Returns numbers, strings and None that calls have read as a parameter.

  Defaults are included. A value is listed by the name that a binding would
  have: that of a macro, if the recipe sets it by one.

  Args:
    parameter: name of a parameter of any function, such as `batch_size`.
  """
  parsed = config_parser.ConfigParser(gin.operative_config_str(), _Delegate())
  statements = [
    x for x in parsed if isinstance(x, config_parser.BindingStatement)
  ]
  macros = {x.selector: x.value for x in statements if not x.arg_name}
  found = {}
  for x in statements:
    if x.arg_name == parameter and not x.scope:
      name, value = f'{x.selector}.{parameter}', x.value
      if isinstance(value, _Macro):
        name, value = value.name, macros.get(value.name)
      if isinstance(value, int | float | str | None):
        found[name] = value
  return found
