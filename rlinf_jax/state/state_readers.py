"""Readers of a state, of which every place reads its own part alone."""

from collections.abc import Callable, Iterator, Mapping
import dataclasses
from typing import Any, Protocol

import jax

from sharding import deferred

Layouts = Mapping[int, Mapping[str, jax.sharding.Sharding]]


class StateReader(Protocol):
  """Reads a state array by array. It is sent to processes, and holds no array.

  `shapes` is a tree of the shapes and types of the whole state, and `layouts`
  says which of its leaves are wanted, by number, and with which sharding at
  each place that holds them.
  """

  def read(
    self, shapes: Any, layouts: Layouts
  ) -> Iterator[tuple[int, str, jax.Array]]:
    """Yields the number of each leaf, its place, and an array of its own.

    Raises:
      ValueError: if the state is another one.
    """

  def of_constants(self) -> 'StateReader':
    """A reader of the values that steps do not change.

    Other values that it reads may be those of another step: what this reader
    reads may have been removed, and others' constants are the same.
    """


@dataclasses.dataclass(frozen=True)
class FirstState:
  """The state that a function makes.

  Every process calls the function, and computes of its result what it holds.

  Attributes:
    make: `() -> state`; its parameters may come from `deferred.read`.
  """

  make: Callable[[], Any]

  def read(
    self, shapes: Any, layouts: Layouts
  ) -> Iterator[tuple[int, str, jax.Array]]:
    """As `StateReader`."""
    leaves = self.leaves(shapes)
    for i, by_place in layouts.items():
      for place, layout in by_place.items():
        yield i, place, deferred.put(leaves[i], layout)
      leaves[i] = None  # Frees what no other leaf is computed from.

  def leaves(self, shapes: Any) -> list[Any]:
    """Calls the function; returns the leaves of the state, deferred.

    Raises:
      ValueError: if the state has another structure.
    """
    state = deferred.defer(self.make)
    if jax.tree.structure(state) != jax.tree.structure(shapes):
      raise ValueError(
        f'The state has the structure {jax.tree.structure(state)}, and steps '
        f'carry {jax.tree.structure(shapes)}: make it with the same workflow.'
      )
    return jax.tree.leaves(state)

  def of_constants(self) -> StateReader:
    """As `StateReader`."""
    return self


class RepeatedReader:
  """Reads the first state in many parts, in this process.

  The function that makes it is called once. No array is kept: each read
  computes what it yields.
  """

  def __init__(self, first: FirstState):
    """Makes nothing yet."""
    self._first, self._leaves = first, None

  def read(
    self, shapes: Any, layouts: Layouts
  ) -> Iterator[tuple[int, str, jax.Array]]:
    """As `StateReader`."""
    if self._leaves is None:
      self._leaves = self._first.leaves(shapes)
    for i, by_place in layouts.items():
      for place, layout in by_place.items():
        yield i, place, deferred.put(self._leaves[i], layout, keep=False)

  def of_constants(self) -> StateReader:
    """As `StateReader`."""
    return self
