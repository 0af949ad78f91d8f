"""Numbers with bounds, for annotations of what recipes bind.

A recipe that binds a number outside of its bounds is refused when it is read.
Functions called from Python take the annotation as documentation. The names are
those of pydantic.
"""

import dataclasses
from typing import Annotated

import annotated_types


@dataclasses.dataclass(frozen=True)
class MultipleOf:
  """Says in an annotation that a number is a multiple of another parameter.

  Attributes:
    name: the other parameter of the same function.
  """

  name: str


PositiveInt = Annotated[int, annotated_types.Ge(1)]
# Such as rows that are evaluated, of which each batch has the same number.
HeldOut = Annotated[PositiveInt, MultipleOf('held_out_batch')]
NonNegativeInt = Annotated[int, annotated_types.Ge(0)]
PositiveFloat = Annotated[float, annotated_types.Gt(0)]
NonNegativeFloat = Annotated[float, annotated_types.Ge(0)]
AtLeastOne = Annotated[float, annotated_types.Ge(1)]
AboveOne = Annotated[float, annotated_types.Gt(1)]
# From 0 to 1, such as a probability.
Fraction = Annotated[float, annotated_types.Ge(0), annotated_types.Le(1)]
# A share that an average keeps: 1 would never forget.
Decay = Annotated[float, annotated_types.Ge(0), annotated_types.Lt(1)]
