"""The state in a checkpoint, which every place reads its own part of."""

from collections.abc import Iterator, Mapping
import dataclasses
import functools
import pathlib
from typing import Any

import jax

from rlinf_jax.state import frozen_weights, state_files, state_readers
from sharding import deferred, offload

STATE = 'state'  # The folder of the state within that of a step.


@dataclasses.dataclass(frozen=True)
class SavedState:
  """A `state_readers.StateReader` of a checkpoint.

  Attributes:
    folder: of all checkpoints of the run.
    step: of this one.
    frozen: checksum of each frozen array, by its key.
    first: reads frozen arrays, which are in no checkpoint.
  """

  folder: str
  step: int
  frozen: Mapping[str, int]
  first: state_readers.StateReader

  def read(
    self, shapes: Any, layouts: state_readers.Layouts
  ) -> Iterator[tuple[int, str, jax.Array]]:
    """As `StateReader`."""
    leaves = state_files.leaves(jax.tree.structure(shapes))
    frozen = {i: layouts[i] for i in layouts if leaves[i].is_frozen}
    if frozen:  # First, so that nothing is yielded beside other weights.
      found = list(self.first.read(shapes, frozen))
      self._check(
        frozen_weights.checksums(
          {leaves[i].key: x for i, _, x in found if x.size}
        )
      )
      while found:
        yield found.pop()
    yield from self._read_saved(leaves, jax.tree.leaves(shapes), layouts)

  @functools.cached_property
  def _stored(self) -> dict[str, state_files.Stored]:
    """Contents of the files, looked up once: complete ones do not change."""
    return state_files.stored(
      pathlib.Path(self.folder) / str(self.step) / STATE
    )

  def _read_saved(self, leaves, shapes, layouts):
    """Yields what the files of the checkpoint hold."""
    places = {place for by_place in layouts.values() for place in by_place}
    for place in sorted(places):
      wanted = {
        i: jax.ShapeDtypeStruct(
          shapes[i].shape,
          shapes[i].dtype,
          sharding=offload.on_device(by_place[place]),
        )
        for i, by_place in layouts.items()
        if place in by_place and not leaves[i].is_frozen
      }
      if not wanted:
        continue
      arrays = state_files.read(
        self._stored, {leaves[i].name: x for i, x in wanted.items()}
      )
      for i in wanted:
        yield (
          i,
          place,
          deferred.put(arrays.pop(leaves[i].name), layouts[i][place]),
        )

  def _check(self, checksums: Mapping[str, int]):
    """Raises ValueError if frozen arrays are not those of the checkpoint."""
    if any(self.frozen.get(key) != x for key, x in checksums.items()):
      raise ValueError(self.other_weights())

  def other_weights(self) -> str:
    """The message for frozen weights that are not those of the checkpoint."""
    return (
      f'The checkpoint of step {self.step} in {self.folder} was trained beside '
      'other frozen weights than those that are given now: give it the '
      'model, teacher and reward models that the run began with. If these are '
      'the same, the run began with a version of this package that held them '
      'in another type, and goes on with that version alone.'
    )

  def of_constants(self) -> state_readers.StateReader:
    """As `StateReader`: reads the newest checkpoint of the run."""
    folders = pathlib.Path(self.folder).iterdir()
    steps = [int(path.name) for path in folders if path.name.isdigit()]
    return dataclasses.replace(self, step=max(steps, default=self.step))
