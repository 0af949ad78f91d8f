"""A calculator as a tool. Its processes import little else."""

import simpleeval

MAX_CHARACTERS = 1000


def calculator(expression: str) -> str:
  """Computes an arithmetic expression.

  Args:
    expression: The expression, such as 12 * (3 + 4).
  """
  if len(expression) > MAX_CHARACTERS:
    raise ValueError(f'the expression has over {MAX_CHARACTERS} characters')
  # No names, functions or attributes: arithmetic alone.
  value = simpleeval.SimpleEval(functions={}, names={}).eval(expression)
  if isinstance(value, bool) or not isinstance(value, int | float):
    raise ValueError('the value is not a number')
  return str(value)
