"""Arrays that a compiler for GPUs makes in one kernel, as they read the same.

XLA for GPUs merges elementwise kernels of the same shape that share an operand
and do not wait for each other. A kernel of several results cannot write any of
them over what it reads, so that all results lie beside all operands. In the
backward pass of a feed-forward, three arrays of its width are read, and three
more are made of them.
"""

from collections.abc import Sequence

from planner.counting import variables

SCALAR = 16  # Bytes: smaller arrays need no kernel of their own.


def merge(buffers: Sequence[variables.Buffer]):
  """Moves results of a merged kernel to when the last operand is there.

  Args:
    buffers: all of a program, in the order in which they are made.
  """
  for kernel in kernels(buffers):
    ready = max(source.born for made in kernel for source in made.sources)
    for made in kernel:
      made.born, made.last = ready, max(made.last, ready)


def kernels(
  buffers: Sequence[variables.Buffer],
) -> list[list[variables.Buffer]]:
  """Returns the results of each kernel that makes several."""
  found = {}
  for buffer in buffers:
    if buffer.size <= SCALAR or not buffer.sources:
      continue
    some = found.setdefault(buffer.shape, [])
    for kernel in some:
      if any(_shares(buffer, made) for made in kernel) and not any(
        buffer.waits_for(made) for made in kernel
      ):
        kernel.append(buffer)
        break
    else:
      some.append([buffer])
  return [
    kernel for some in found.values() for kernel in some if len(kernel) > 1
  ]


def _shares(one: variables.Buffer, other: variables.Buffer) -> bool:
  """Returns whether two results read the same array."""
  return any(
    one.sources[source] > SCALAR
    for source in one.sources.keys() & other.sources
  )
