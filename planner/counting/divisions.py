"""Finds which dimensions of a program's arrays are divided among devices.

Arguments are divided by their letters, and activations where the program says
so by `jax.lax.with_sharding_constraint`. From there, results are divided like
their operands. XLA also goes the other way, from results to operands. Of that,
one case is known here: an array of the shape of a parameter, such as a sum of
its gradients, is divided like the parameter.
"""

from collections.abc import Callable
import math
from typing import Any

from jax.sharding import PartitionSpec

from planner.costs.mesh import layout as layout_lib
from planner.counting import kernels

# The mesh axes that divide each dimension of an array.
Divided = tuple[tuple[str, ...], ...]


def whole(shape) -> Divided:
  return ((),) * len(shape)


def of_spec(spec, rank: int) -> Divided:
  """Returns the axes of each dimension that a `PartitionSpec` names."""
  axes = [(x,) if isinstance(x, str) else tuple(x or ()) for x in spec]
  return (*axes, *whole(range(rank - len(axes))))


class Division:
  """Divides the arrays of a program over some axes of a mesh."""

  def __init__(self, axes: layout_lib.Axes, layout: layout_lib.Layout):
    """Takes the axes, and the axes of each letter.

    Args:
      axes: names and sizes of the mesh axes.
      layout: says which axes divide a letter.
    """
    self.sizes, self.layout = dict(axes), layout
    self._like = {}

  def argument(self, letters, shape) -> Divided:
    """Returns how an argument is divided, by the letters of its dimensions."""
    if letters is None or len(letters) != len(shape):
      return whole(shape)
    divided = tuple(map(self._axes, letters, shape))
    if len(shape) > 1 and any(divided):
      self._like[shape] = divided
      if not letters[0]:  # Stacked layers: one is as the others.
        self._like[shape[1:]] = divided[1:]
    return divided

  def _axes(self, letter: str, size: int) -> tuple[str, ...]:
    axes = tuple(x for x in self.layout.axes_of(letter) if x in self.sizes)
    return axes if size > 1 and not size % self.ways([axes]) else ()

  def letter_of(self, axis: str) -> str:
    """Returns a letter whose dimensions an axis divides."""
    return next(x for x in self.layout.rules if axis in self.layout.axes_of(x))

  def shares(self, letters) -> bool:
    """Whether an axis divides dimensions of one of the letters."""
    return any(
      axis in self.sizes for x in letters for axis in self.layout.axes_of(x)
    )

  def ways(self, divided) -> int:
    """Returns the number of parts of an array."""
    return math.prod(self.sizes[axis] for axes in divided for axis in axes)

  def results(self, eqn, operands: list[Divided]) -> list[Divided]:
    """Returns how the results of an equation are divided."""
    rule = RULES.get(eqn.primitive.name)
    if rule is None and 'axes' in eqn.params:
      rule = _reduced if eqn.primitive.name.startswith('reduce_') else None
    made = (rule or _alike)(eqn, operands)
    return [
      self._checked(some, getattr(var.aval, 'shape', ()))
      for some, var in zip(made, eqn.outvars, strict=True)
    ]

  def _checked(self, divided: Divided, shape) -> Divided:
    """Drops axes that divide two dimensions, or one that is not divisible."""
    kept, used = [], set()
    for axes, size in zip(divided, shape, strict=True):
      axes = tuple(x for x in axes if x in self.sizes and x not in used)
      axes = axes if not size % self.ways([axes]) else ()
      used.update(axes)
      kept.append(axes)
    return tuple(kept) if used else self._like.get(tuple(shape), tuple(kept))


def _alike(eqn, operands) -> list[Divided]:
  """Dimensions that keep their size are divided as those of an operand."""
  made = []
  for var in eqn.outvars:
    shape, found = getattr(var.aval, 'shape', ()), []
    for d, size in enumerate(shape):
      some = [
        divided[d]
        for x, divided in zip(eqn.invars, operands, strict=True)
        if len(divided) == len(shape) and x.aval.shape[d] == size
      ]
      found.append(next(filter(None, some), ()))
    made.append(tuple(found))
  return made


def _reduced(eqn, operands) -> list[Divided]:
  gone = eqn.params['axes']
  kept = tuple(x for i, x in enumerate(operands[0]) if i not in gone)
  return [kept] * len(eqn.outvars)


def _transposed(eqn, operands) -> list[Divided]:
  return [tuple(operands[0][i] for i in eqn.params['permutation'])]


def _squeezed(eqn, operands) -> list[Divided]:
  gone = eqn.params['dimensions']
  return [tuple(x for i, x in enumerate(operands[0]) if i not in gone)]


def _broadcast(eqn, operands) -> list[Divided]:
  shape = eqn.outvars[0].aval.shape
  made, old = [()] * len(shape), eqn.invars[0].aval.shape
  for i, to in enumerate(eqn.params['broadcast_dimensions']):
    if old[i] == shape[to]:
      made[to] = operands[0][i]
  return [tuple(made)]


def _reshaped(eqn, operands) -> list[Divided]:
  """The outermost of dimensions that are merged or split is divided."""
  old, new = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
  made, i, j = [()] * len(new), 0, 0
  while i < len(old) and j < len(new) and 0 not in old:
    if old[i] == 1 or new[j] == 1:
      i, j = i + (old[i] == 1), j + (new[j] == 1 and old[i] != 1)
      continue
    made[j] = operands[0][i]
    a, b = old[i], new[j]
    i, j = i + 1, j + 1
    while a != b:
      if a < b:
        a, i = a * old[i], i + 1
      else:
        b, j = b * new[j], j + 1
  return [tuple(made)]


def _product(eqn, operands) -> list[Divided]:
  (over, batch), made = eqn.params['dimension_numbers'], []
  made += [
    operands[0][i] or operands[1][j] for i, j in zip(*batch, strict=True)
  ]
  for divided, gone, shared in zip(operands, over, batch, strict=True):
    gone = {*gone, *shared}
    made += [x for i, x in enumerate(divided) if i not in gone]
  return [tuple(made)]


def _ragged_product(eqn, operands) -> list[Divided]:
  """A product of rows by a matrix of each group; or a sum for each group."""
  (left, right), shape = operands[:2], eqn.outvars[0].aval.shape
  numbers = eqn.params['ragged_dot_dimension_numbers']
  over = numbers.dot_dimension_numbers[0]
  free = [
    [x for i, x in enumerate(divided) if i not in gone]
    for divided, gone in zip((left, right), over, strict=True)
  ]
  made = [*free[0][:-1], free[0][-1], free[1][-1]][-len(shape) :]
  return [tuple([()] * (len(shape) - len(made)) + made)]


def _gathered(eqn, operands) -> list[Divided]:
  """Slices keep dimensions that they have in full, and indices theirs."""
  numbers, sizes = eqn.params['dimension_numbers'], eqn.params['slice_sizes']
  shape = eqn.invars[0].aval.shape
  gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
  of_slices = iter(
    operands[0][i] if sizes[i] == shape[i] else ()
    for i in range(len(shape))
    if i not in gone
  )
  of_indices = iter(operands[1][:-1])
  rank = len(eqn.outvars[0].aval.shape)
  return [
    tuple(
      next(of_slices if i in numbers.offset_dims else of_indices)
      for i in range(rank)
    )
  ]


def _constrained(eqn, operands) -> list[Divided]:
  """As the program says; dimensions that it leaves open stay as they are."""
  spec = eqn.params['sharding'].spec
  # A mapped dimension may be open in the specification alone.
  is_open = {*eqn.params['unconstrained_dims']} | {
    i for i, x in enumerate(spec) if x is PartitionSpec.UNCONSTRAINED
  }
  named = [None if i in is_open else x for i, x in enumerate(spec)]
  made = of_spec(named, len(operands[0]))
  return [
    tuple(
      before if i in is_open else axes
      for i, (before, axes) in enumerate(zip(operands[0], made, strict=True))
    )
  ]


def _unknown(eqn, operands) -> list[Divided]:
  del operands
  return [whole(getattr(var.aval, 'shape', ())) for var in eqn.outvars]


RULES: dict[str, Callable[[Any, list[Divided]], list[Divided]]] = {
  'argmax': _reduced,
  'argmin': _reduced,
  'broadcast_in_dim': _broadcast,
  'conv_general_dilated': _unknown,
  'dot_general': _product,
  'gather': _gathered,
  **dict.fromkeys(kernels.PRIMITIVES, _unknown),
  'ragged_dot_general': _ragged_product,
  'reshape': _reshaped,
  'sharding_constraint': _constrained,
  'squeeze': _squeezed,
  'transpose': _transposed,
}
