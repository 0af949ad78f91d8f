"""Tools: Python functions that a model may call."""

from collections.abc import Callable, Mapping
import inspect
from typing import Any, NamedTuple

from rlinf_jax.isolation import pool


class Tool(NamedTuple):
  """A function that a model may call.

  Attributes:
    name: by which the model calls it.
    schema: its JSON schema, as chat templates take it.
    calls: the processes that run it.
    bound: arguments that the model neither sees nor gives.
  """

  name: str
  schema: dict
  calls: pool.Pool
  bound: Mapping[str, Any] = {}

  def call(self, arguments: Mapping[str, Any] | str) -> str:
    """The result as text.

    Args:
      arguments: by name; the text of the only argument will do, too.

    Raises:
      pool.CallError: if the call failed; the message is for the model.
    """
    if isinstance(arguments, str):
      names = list(self.schema['function']['parameters']['properties'])
      if len(names) != 1:
        raise pool.CallError(
          f'{self.name} needs its arguments by name: {", ".join(names)}'
        )
      arguments = {names[0]: arguments}
    return str(self.calls.call((), {**arguments, **self.bound}))


def tool(
  function: Callable,
  *,
  bound: Mapping[str, Any] | None = None,
  seconds: float = 2.0,
  memory: float = 2.0,
  processes: int | None = None,
) -> Tool:
  """A tool from a function of a module, run in a bounded pool of processes.

  Its schema follows from the types of its arguments and from its docstring,
  which describes each of them under `Args:`. A call that raises, takes too long
  or ends its process gives the model an error to read.

  Args:
    function: the function, which the processes import. Its attribute `check`,
      if it has one, is called first, and raises where it cannot work.
    bound: arguments that are always these, so that the model is not told of
      them; anything that JSON can write.
    seconds: that one call may take.
    memory: gigabytes that a process may map.
    processes: their number; by default one a CPU, at most 8.

  Raises:
    ValueError: for a function without types or descriptions, or one that
      cannot be imported by its name.
  """
  from transformers import utils

  bare = inspect.unwrap(function)  # Gin wraps what recipes name.
  check = getattr(bare, 'check', None)
  if check is not None:
    check()
  calls = pool.pool(bare, seconds=seconds, memory=memory, processes=processes)
  try:
    schema = utils.get_json_schema(bare)
  except (utils.DocstringParsingException, utils.TypeHintParsingException) as e:
    raise ValueError(
      f'The function {bare.__qualname__} cannot be a tool ({e}): give each '
      'argument a type, and a line under `Args:` of its docstring.'
    ) from e
  arguments = schema['function']['parameters']
  for name in bound or ():
    del arguments['properties'][name]
    if name in arguments.get('required', ()):
      arguments['required'].remove(name)
  return Tool(schema['function']['name'], schema, calls, bound or {})
