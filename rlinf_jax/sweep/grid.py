"""The points of a grid: what a sweep runs, and what each point is called."""

import ast
from collections.abc import Iterable, Mapping
import itertools
import os
import pathlib
import re
from typing import Any, NamedTuple

_MOST_POINTS = 10_000


class Point(NamedTuple):
  """A run of the grid; `name` is its folder's, `values` by full name."""

  name: str
  folder: pathlib.Path
  values: Mapping[str, Any]


def parse_over(text: str) -> tuple[str, list[Any]]:
  """Reads 'name = [value, ...]' or 'name = range(...)'.

  Raises:
    ValueError: a sentence.
  """
  name, _, right = (part.strip() for part in text.partition('='))
  fault = f"--over '{text}' is not a parameter and its values"
  if not re.fullmatch(r'(\w+/)*\w+(\.\w+)*', name):
    raise ValueError(
      f"{fault}; write for instance --over 'train.train.seed = range(3)'."
    )
  try:
    tree = ast.parse(right, mode='eval').body
    match tree:
      case ast.Call(func=ast.Name(id='range'), args=arguments, keywords=[]):
        values = range(*map(ast.literal_eval, arguments))
      case _:
        values = ast.literal_eval(tree)
    if not isinstance(values, range | list | tuple) or not values:
      raise ValueError(f'{right} holds no values')
    if len(values) > _MOST_POINTS:
      raise ValueError(f'more than {_MOST_POINTS} values')
  except (OverflowError, SyntaxError, TypeError, ValueError) as error:
    raise ValueError(
      f'{fault}: {right or "nothing"} should be a Python list such as '
      '[0.2, 0.28], or a range such as range(3).'
    ) from error
  return name, list(values)


def grid(over: Iterable[str], workdir: str | os.PathLike) -> list[Point]:
  """Every combination of values, the last parameter changing fastest.

  Raises:
    ValueError: a sentence; two points would be the same.
  """
  axes = [parse_over(text) for text in over]
  names = [name for name, _ in axes]
  short = labels(names)
  points = {}
  for values in itertools.product(*(values for _, values in axes)):
    folder = ','.join(
      f'{label}={_word(value)}'
      for label, value in zip(short, values, strict=True)
    )
    point = Point(
      folder,
      pathlib.Path(workdir) / folder,
      dict(zip(names, values, strict=True)),
    )
    if folder in points or len(set(names)) < len(names):
      raise ValueError(
        f'Two points of the grid would be called {folder}; give each --over '
        'another parameter, and each of its values once.'
      )
    points[folder] = point
  return list(points.values())


def labels(names: Iterable[str]) -> list[str]:
  """The shortest ends of the names that tell them apart."""
  parts = [re.split('[./]', name) for name in names]

  def label(mine):
    for size in range(1, len(mine)):
      if sum(x[-size:] == mine[-size:] for x in parts) == 1:
        return '.'.join(mine[-size:])
    return '.'.join(mine)

  return [label(x) for x in parts]


def _word(value: Any) -> str:
  """A value as part of a folder's name."""
  text = value if isinstance(value, str) else repr(value).replace(' ', '')
  return re.sub(r'[^\w.,+\-()\[\]]', '_', text)
