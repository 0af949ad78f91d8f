"""Reads memory, arithmetic and communication from a compiled executable."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from rlinf_jax.planning.compiled import (
  communication,
  hlo,
  large_arrays,
  matmul_flops,
)
from rlinf_jax.planning.compiled import cycles as cycles_lib


class Memory(NamedTuple):
  """Bytes on each device during a call.

  Attributes:
    arguments: of the arguments.
    outputs: of the results.
    donated: of results that take over the memory of arguments.
    temporary: of everything else: what is alive at once at the most on a TPU,
      elsewhere one block, in which arrays follow each other.
  """

  arguments: int
  outputs: int
  donated: int
  temporary: int

  @property
  def needed(self) -> int:
    """Bytes that a call allocates, its arguments included."""
    return self.arguments + self.outputs - self.donated + self.temporary


class Executable(NamedTuple):
  """A compiled stage: the costs of one call on one device.

  Attributes:
    memory: bytes.
    matmul_flops: operations of matrix products; loops that may end early count
      in full.
    collectives: communication, most bytes first.
    large_arrays: the largest arrays that are written to memory.
    scores: the largest array of a score for each pair of tokens; None if
      attention writes none to memory.
    unknown_loops: number of loops whose trip count cannot be seen, which count
      once.
    cycles: of everything but communication, by kind; none where the compiler
      has no estimates.
  """

  memory: Memory
  matmul_flops: float
  collectives: list[communication.Collective]
  large_arrays: list[large_arrays.LargeArray]
  scores: large_arrays.LargeArray | None
  unknown_loops: int
  cycles: Sequence[cycles_lib.Cycles] = ()


def read(
  compiled,
  axes: communication.Axes,
  lengths: Sequence[int] = (),
  widths: Collection[int] = (),
  platform: str = 'cpu',
) -> Executable:
  """Reads a compiled executable.

  Args:
    compiled: a `jax.stages.Compiled`.
    axes: names and sizes of the mesh axes that it was compiled for.
    lengths: tokens of the sequences that it reads or writes.
    widths: sizes of the model's matrices.
    platform: JAX's name of the devices.
  """
  module = hlo.parse(compiled.as_text())
  loops = (
    executed.instruction
    for executed in hlo.walk(module)
    if executed.instruction.opcode == 'while'
  )
  return Executable(
    memory(compiled, platform),
    matmul_flops.matmul_flops(module),
    communication.collectives(module, axes),
    large_arrays.large_arrays(module),
    large_arrays.attention_scores(module, lengths, widths),
    sum(hlo.trip_count(module, loop) is None for loop in loops),
    cycles_lib.cycles(module),
  )


def memory(compiled, platform: str = 'cpu') -> Memory:
  """Returns the bytes that the compiler has planned on each device.

  XLA for TPUs says up to 1.5 times as much of temporary arrays as its own
  buffer assignment has. It accepts a program from the memory that its
  `peak_memory_in_bytes` has, so this is what is read there. That of the host
  is among it, too.
  """
  analysis = compiled.memory_analysis()
  found = Memory(
    analysis.argument_size_in_bytes,
    analysis.output_size_in_bytes,
    analysis.alias_size_in_bytes,
    analysis.temp_size_in_bytes,
  )
  if platform != 'tpu':
    return found
  others = (
    found.arguments
    + found.outputs
    - found.donated
    + analysis.host_argument_size_in_bytes
    + analysis.host_output_size_in_bytes
    - analysis.host_alias_size_in_bytes
    + analysis.host_temp_size_in_bytes
  )
  return found._replace(temporary=analysis.peak_memory_in_bytes - others)
