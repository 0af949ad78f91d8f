"""The grid of a sweep: its points, and their names."""

import ast
from collections.abc import Iterable, Mapping
import itertools
import math
import os
import pathlib
import re
from typing import Any, NamedTuple

_MOST_POINTS = 10_000  # Of a grid, and so of each of its parameters.


class Point(NamedTuple):
  """A point of the grid, which is one run.

  Attributes:
    name: of its folder.
    folder: its run folder.
    values: of the parameters, by their full names.
  """

  name: str
  folder: pathlib.Path
  values: Mapping[str, Any]


def parse_over(text: str) -> tuple[str, list[Any]]:
  """Reads 'name = [value, ...]' or 'name = range(...)'.

  Raises:
    ValueError: if the text is neither.
  """
  name, _, right = (part.strip() for part in text.partition('='))
  problem = f"--over '{text}' is not a parameter and its values"
  if not re.fullmatch(r'(\w+/)*\w+(\.\w+)*', name):
    raise ValueError(
      f"{problem}. Write, for example, --over 'train.train.seed = range(3)'."
    )
  try:
    tree = ast.parse(right, mode='eval').body
    match tree:
      case ast.Call(func=ast.Name(id='range'), args=arguments, keywords=[]):
        values = range(*map(ast.literal_eval, arguments))
      case _:
        values = ast.literal_eval(tree)
    if not isinstance(values, range | list | tuple) or not values:
      raise ValueError(f'{right} has no values')
    if len(values) > _MOST_POINTS:
      raise ValueError(f'more than {_MOST_POINTS} values')
  except (OverflowError, SyntaxError, TypeError, ValueError) as error:
    raise ValueError(
      f'{problem}: {right or "nothing"} should be a Python list such as '
      '[0.2, 0.28], or a range such as range(3).'
    ) from error
  return name, list(values)


def grid(over: Iterable[str], workdir: str | os.PathLike) -> list[Point]:
  """Lists every combination of values; the last parameter varies fastest.

  Raises:
    ValueError: if two points have the same name, or there are too many.
  """
  axes = [parse_over(text) for text in over]
  number = math.prod(len(values) for _, values in axes)
  if number > _MOST_POINTS:
    raise ValueError(
      f'The grid has {number:,} points, as every --over multiplies them, and '
      f'the most are {_MOST_POINTS:,}: give fewer values.'
    )
  names = [name for name, _ in axes]
  short = labels(names)
  points = {}
  for values in itertools.product(*(values for _, values in axes)):
    folder = ','.join(
      f'{label}={_file_name(value)}'
      for label, value in zip(short, values, strict=True)
    )
    point = Point(
      folder,
      pathlib.Path(workdir) / folder,
      dict(zip(names, values, strict=True)),
    )
    if folder in points or len(set(names)) < len(names):
      raise ValueError(
        f'Two points of the grid have the name {folder}: give every --over a '
        'different parameter, list each value once, and let texts differ in '
        'letters or digits, as names of folders have no / or spaces.'
      )
    points[folder] = point
  return list(points.values())


def bindings(point: Point) -> list[str]:
  """The bindings of a point, as gin reads them."""
  return [f'{name} = {value!r}' for name, value in point.values.items()]


def labels(names: Iterable[str]) -> list[str]:
  """The shortest suffixes of dotted names that distinguish them."""
  parts = [re.split('[./]', name) for name in names]

  def label(own):
    for size in range(1, len(own)):
      if sum(x[-size:] == own[-size:] for x in parts) == 1:
        return '.'.join(own[-size:])
    return '.'.join(own)

  return [label(x) for x in parts]


def _file_name(value: Any) -> str:
  """A value as part of the name of a folder."""
  text = value if isinstance(value, str) else repr(value).replace(' ', '')
  return re.sub(r'[^\w.,+\-()\[\]]', '_', text)
