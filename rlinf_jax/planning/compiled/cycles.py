"""Cycles of a compiled program, as XLA's compiler for TPUs estimates them."""

import re
from typing import NamedTuple

from rlinf_jax.planning.compiled import hlo, matmul_flops

ESTIMATE = re.compile(r'"estimated_cycles":"?(\d+)')
UNKNOWN = 2**50  # Larger estimates stand for none.


class Cycles(NamedTuple):
  """The work of a call on one device, its communication left out.

  Attributes:
    estimated: cycles of the operations that the compiler has an estimate of.
    other_flops: operations of matrix products in the others, such as kernels.
  """

  estimated: float
  other_flops: float

  def seconds(self, clock_hertz: float, peak_flops: float) -> float:
    """Returns the seconds of a call that computes the others at its peak."""
    return self.estimated / clock_hertz + self.other_flops / peak_flops


def cycles(module: hlo.Module) -> Cycles | None:
  """Adds up the estimates; None if the compiler made none, as for GPUs.

  XLA estimates an operation by the cycles of a turn of the loop that it is in.
  Loops count as `hlo.walk` counts them.
  """
  estimated, other_flops = 0.0, 0.0
  has_estimate = set()  # Callers, whose parts are within their estimates.
  for instruction, times, computation, caller in hlo.walk(module):
    if caller and caller.name in has_estimate:
      continue
    found = ESTIMATE.search(instruction.attributes)
    if found and int(found[1]) < UNKNOWN:
      has_estimate.add(instruction.name)
      estimated += times * int(found[1])
    else:
      other_flops += times * matmul_flops.flops(instruction, computation)
  return Cycles(estimated, other_flops) if has_estimate else None
