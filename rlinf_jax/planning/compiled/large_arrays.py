"""Large arrays that a compiled program writes to memory."""

from collections.abc import Iterable, Sequence
import itertools
from typing import NamedTuple

from rlinf_jax.planning.compiled import hlo

# Their results are other arrays, or parts of them, under another name.
ALIASES = frozenset(
  (
    'bitcast',
    'call',
    'conditional',
    'get-tuple-element',
    'optimization-barrier',
    'parameter',
    'tuple',
    'while',
  )
)
SHOWN = 5
ON_CHIP = 'S(1)'  # TPU's layouts mark arrays in its vector memory so.


class LargeArray(NamedTuple):
  """An array that a call writes to memory.

  Attributes:
    array: its type on one device.
    times: how many arrays of this type and origin a call writes.
    op_name: the operation of JAX that it stems from.
  """

  array: hlo.Array
  times: int
  op_name: str


def large_arrays(module: hlo.Module, shown: int = SHOWN) -> list[LargeArray]:
  """Returns the largest arrays that a call writes to memory, largest first.

  Results inside fusions stay in registers and do not count.
  """
  found = {}
  for executed in hlo.walk(module):
    instruction = executed.instruction
    if executed.caller or instruction.opcode in ALIASES:
      continue
    if instruction.opcode.endswith(('-start', '-update')):
      continue  # Its end names the result alone.
    for array in instruction.arrays:
      if ON_CHIP not in instruction.result:
        key = array, instruction.op_name
        found[key] = found.get(key, 0) + executed.times
  largest = sorted(found.items(), key=lambda entry: -entry[0][0].bytes)[:shown]
  return [
    LargeArray(array, times, op_name) for (array, op_name), times in largest
  ]


def attention_scores(
  arrays: Iterable[LargeArray], lengths: Sequence[int]
) -> LargeArray | None:
  """Returns the largest array that has a score for each pair of tokens.

  Args:
    arrays: arrays of a call, largest first.
    lengths: tokens of the sequences that the call reads or writes. Two of them
      may follow each other, as a completion follows its prompt.
  """
  tokens = {*lengths, *(a + b for a, b in itertools.combinations(lengths, 2))}
  for large in arrays:
    if sum(n in tokens for n in large.array.shape) >= 2:
      return large
  return None
