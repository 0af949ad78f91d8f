"""Values of the parameters that the recipe's functions were called with."""

from typing import Any

import gin

from rlinf_jax.config import config_bindings


def read(parameter: str) -> dict[str, Any]:
  """Returns numbers, strings and None that calls have read as a parameter.

  Defaults are included. A value is listed by the name that a binding would
  have: that of a macro, if the recipe sets it by one.

  Args:
    parameter: name of a parameter of any function, such as `batch_size`.
  """
  ran = config_bindings.parse(gin.operative_config_str())
  found = {}
  for (scope, _), arguments in ran.items():
    if scope or parameter not in arguments:
      continue
    name, value, _ = arguments[parameter]
    if isinstance(value, config_bindings.Reference):
      if value.selector != config_bindings.MACRO:
        continue
      macro = ran.get((value.scope, config_bindings.MACRO))
      if macro is None:  # Its value cannot be written.
        continue
      name, value = value.scope, macro['value'].value
    if isinstance(value, int | float | str | None):
      found[name] = value
  return found


def read_numbers(parameter: str) -> dict[str, int | float]:
  """As `read`, of numbers alone."""
  return {
    name: value
    for name, value in read(parameter).items()
    if isinstance(value, int | float)
  }
