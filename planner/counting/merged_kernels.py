"""Memory of arrays that XLA for GPUs computes in one kernel.

XLA for GPUs merges elementwise kernels of the same shape that share an operand
and do not wait for each other. A kernel of several results cannot write any of
them over its operands, so that all results and all operands are in memory at
once. In the backward pass of a feed-forward, three arrays of its width are
read, and three more are made of them.

Where all readers of a matrix product round it, and there are at least three,
XLA rounds it once, in a kernel of its own, as the readers then read fewer
bytes. The result of one reader is then written over the rounded product. It is
never written over the product itself, which cuBLAS returns with its workspace.
"""

from collections.abc import Sequence

from planner.counting import variables

SCALAR = 16  # Bytes: smaller arrays need no kernel of their own.


def merge(buffers: Sequence[variables.Buffer]):
  """Sets when merged kernels make their results: when all operands are there.

  Args:
    buffers: all buffers of a program, in the order in which they are made.
      `born` and `last` of results are changed in place.
  """
  for kernel in kernels(buffers):
    ready = max(source.born for made in kernel for source in made.sources)
    for made in kernel:
      made.born, made.last = ready, max(made.last, ready)


def rounded(buffers: Sequence[variables.Buffer]) -> list[variables.Buffer]:
  """Returns new buffers for products that a kernel of their own rounds.

  Args:
    buffers: all buffers of a program, in the order in which they are made. The
      readers of such a product then have the new buffer among their sources.
  """
  readers, found = {}, []
  for buffer in buffers:
    for source in buffer.sources:
      if source.rounded:
        readers.setdefault(source, []).append(buffer)
  for wide, some in readers.items():
    n = len(some)
    if n * wide.size < wide.size + (1 + n) * wide.rounded:
      continue
    born = min(buffer.born for buffer in some)
    if wide.last > born:  # Something else reads it.
      continue
    narrow = variables.Buffer(wide.rounded, born, shape=wide.shape)
    narrow.sources, narrow.is_early = {wide: wide.size}, True
    for buffer in some:
      del buffer.sources[wide]
      buffer.sources[narrow] = narrow.size
    found.append(narrow)
  return found


def place(
  some: Sequence[variables.Buffer], buffers: Sequence[variables.Buffer]
):
  """Sets when rounded products are made and last read.

  Args:
    some: the rounded products, as `rounded` returns them.
    buffers: all other buffers, after `merge`.
  """
  for narrow in some:
    readers = [buffer for buffer in buffers if narrow in buffer.sources]
    narrow.born = min(buffer.born for buffer in readers)
    narrow.last = max(buffer.born for buffer in readers)
    (wide,) = narrow.sources
    wide.ends_early = True
    narrow.ends_early = any(
      buffer.born == narrow.last and buffer.size == narrow.size
      for buffer in readers
    )


def kernels(
  buffers: Sequence[variables.Buffer],
) -> list[list[variables.Buffer]]:
  """Returns the results of each kernel that has several of them."""
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
