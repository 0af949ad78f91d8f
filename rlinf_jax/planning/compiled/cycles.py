"""Time of a compiled program by the cycles that XLA for TPUs estimates."""

from collections.abc import Iterator
import re
from typing import NamedTuple

from rlinf_jax.planning.compiled import hlo, matmul_flops

ESTIMATE = re.compile(r'"estimated_cycles":"?(\d+)')
UNKNOWN = 2**50  # Larger estimates stand for none.
# Opcodes of operations that compute nothing.
COPYING = (
  'broadcast',
  'concatenate',
  'copy',
  'dynamic-slice',
  'dynamic-update-slice',
  'gather',
  'iota',
  'pad',
  'reshape',
  'reverse',
  'slice',
  'transpose',
)


class Cycles(NamedTuple):
  """Operations of one kind that run equally often in a call on a device.

  Attributes:
    kind: 'products', also those that are fused with other work; 'kernels' and
      other products that have no estimate; 'elementwise' and other computation;
      'copies', in which nothing is computed.
    times: how often each of them runs.
    estimated: cycles of all of them in a call; 0 for kernels.
    flops: operations of their matrix products.
  """

  kind: str
  times: int
  estimated: float
  flops: float

  def least(self, clock_hertz: float, peak_flops: float) -> 'Least':
    """Returns their seconds; kernels run at the peak of the device."""
    at_peak = self.flops / peak_flops
    seconds = self.estimated / clock_hertz if self.estimated else at_peak
    return Least(self.kind, self.times, seconds, at_peak)


class Least(NamedTuple):
  """The least seconds of a call for operations of one kind.

  Attributes:
    kind: as in `Cycles`.
    times: likewise.
    seconds: of all of them.
    at_peak: of their matrix products, if these ran at the peak of the device.
  """

  kind: str
  times: int
  seconds: float
  at_peak: float


def cycles(module: hlo.Module) -> list[Cycles]:
  """Divides the work of a call, its communication left out, by kind.

  XLA estimates an operation by the cycles of a turn of the loop that it is in.
  Loops count as `hlo.walk` counts them. Most cycles come first.

  Returns:
    Nothing if the compiler made no estimates, as for GPUs.
  """
  sums = {}
  for kind, times, estimated, flops in _operations(module):
    own = sums.get((kind, times), (0.0, 0.0))
    sums[kind, times] = own[0] + times * estimated, own[1] + times * flops
  found = [Cycles(*key, *own) for key, own in sums.items()]
  if not any(x.estimated for x in found):
    return []
  return sorted(found, key=lambda x: (-x.estimated, -x.flops))


def _operations(module: hlo.Module) -> Iterator[tuple[str, int, int, float]]:
  """Yields the kind, times, cycles and products of each operation that counts.

  What an operation with an estimate calls is within that estimate; products
  among it make it a product.
  """
  operation = None  # The last one with an estimate: its parts follow it.
  for instruction, times, computation, caller in hlo.walk(module):
    flops = matmul_flops.flops(instruction, computation)
    if operation and caller and caller.name == operation[0].name:
      operation = *operation[:3], operation[3] + flops
      continue
    if operation:
      yield _with_kind(*operation)
      operation = None
    found = ESTIMATE.search(instruction.attributes)
    if found and int(found[1]) < UNKNOWN:
      operation = instruction, times, int(found[1]), flops
    elif flops:
      yield 'kernels', times, 0, flops
  if operation:
    yield _with_kind(*operation)


def _with_kind(instruction, times, estimated, flops):
  if flops:
    kind = 'products'
  else:
    kind = 'copies' if instruction.opcode in COPYING else 'elementwise'
  return kind, times, estimated, flops
