"""Large arrays that a compiled program writes to memory."""

from collections.abc import Callable, Collection, Sequence
import itertools
import re
from typing import NamedTuple

from rlinf_jax.planning.compiled import hlo
from stages.models.layers import attention

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
IN_ATTENTION = re.compile(rf'\b{attention.SCOPE}\b')  # Names of operations.


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


def large_arrays(
  module: hlo.Module,
  shown: int = SHOWN,
  counts: Callable[[hlo.Instruction, hlo.Array], bool] | None = None,
) -> list[LargeArray]:
  """Returns the largest arrays that a call writes to memory, largest first.

  Results inside fusions stay in registers and do not count.

  Args:
    module: the program.
    shown: number of arrays to return.
    counts: whether an array of an instruction's result counts; None for all.
  """
  found = {}
  for executed in hlo.walk(module):
    instruction = executed.instruction
    if executed.caller or instruction.opcode in ALIASES:
      continue
    if instruction.opcode.endswith(('-start', '-update')):
      continue  # Its end names the result alone.
    for array in instruction.arrays:
      if counts and not counts(instruction, array):
        continue
      if ON_CHIP not in instruction.result:
        key = array, instruction.op_name
        found[key] = found.get(key, 0) + executed.times
  largest = sorted(found.items(), key=lambda entry: -entry[0][0].bytes)[:shown]
  return [
    LargeArray(array, times, op_name) for (array, op_name), times in largest
  ]


def attention_scores(
  module: hlo.Module, lengths: Sequence[int], widths: Collection[int] = ()
) -> LargeArray | None:
  """Returns the largest array that has a score for each pair of tokens.

  A number of tokens may also be a width of the model. Then a matrix, or the
  activations of a row, have the dimensions of scores, and an array counts only
  if attention computes it, by the names of operations.

  Args:
    module: the program of a call.
    lengths: tokens of the sequences that the call reads or writes. Two of them
      may follow each other, as a completion follows its prompt.
    widths: sizes of the model's matrices.
  """
  tokens = {*lengths, *(a + b for a, b in itertools.combinations(lengths, 2))}
  unmistakable = tokens.difference(widths)
  attending = _attending(module, tokens)

  def counts(instruction, array):
    return _pairs(array, unmistakable) or (
      instruction.name in attending and _pairs(array, tokens)
    )

  return next(iter(large_arrays(module, 1, counts)), None)


def _pairs(array: hlo.Array, tokens: Collection[int]) -> bool:
  """Whether two dimensions of an array are numbers of tokens."""
  return sum(n in tokens for n in array.shape) >= 2


def _attending(module: hlo.Module, tokens: Collection[int]) -> set[str]:
  """Names of instructions and fusions in which attention pairs tokens."""
  return {
    (executed.caller or executed.instruction).name
    for executed in hlo.walk(module)
    if IN_ATTENTION.search(executed.instruction.op_name)
    and any(_pairs(array, tokens) for array in executed.instruction.arrays)
  }
