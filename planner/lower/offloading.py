"""Finds the values that lie in host memory under a plan that offloads stages.

A stage that replaces a carried value, as `apply` replaces an optimizer's
moments, needs only a slice of it on the device at a time. The runtime hands it
such values in host memory (`sharding.streaming`), so that they are never on the
device as a whole. Other values are restored before a stage and offloaded after
it.
"""

import collections
from collections.abc import Iterable

import numpy as np

from planner.ir import graph


def private(flow: graph.Flow, names) -> dict[int, int]:
  """Returns the carried values that only the stages `names` read.

  Nodes that the planner added to move rows do not count as readers; those that
  read their results do. Of a loop, the stages of its body count. A value that
  is kept under another carried value, too, such as the number of updates of a
  version that acts in the next step, is read there by others.

  Returns:
    The id at the end of the step, by the id at its start.
  """
  names = set(names)
  kept = collections.Counter(end for _, end in flow.carry)
  return {
    start: end
    for start, end in flow.carry
    if names
    and (some := _readers(flow, start))
    and some <= names
    and kept[end] == 1
    and (start == end or not kept[start])
  }


def _readers(flow: graph.Flow, v: int) -> set[str]:
  """Returns the names of the stages that read a value.

  A loop that hands it on, or ends by it, counts as a stage without a place.
  """
  found = set()
  for i in flow.readers.get(v, ()):
    node = flow.nodes[i]
    if graph.is_plumbing(node):
      found = found.union(*(_readers(flow, made) for made in node.writes))
    elif node.body:
      body = node.body
      inner = [x for x, outer in node.ids_before.items() if outer == v]
      handed_on = {*body.outputs, *(end for _, end in body.carry)}
      found = found.union(*(_readers(body, x) for x in inner))
      found |= {node.name} if handed_on.intersection(inner) else set()
    else:
      found.add(node.name)
  return found


def streamed(
  flow: graph.Flow, names: Iterable[str]
) -> dict[int, dict[int, int]]:
  """Returns the values that calls update in host memory.

  These are carried arrays that only the stage reads and that it replaces, in
  one call or in several. The stage must take all rows at once. Single numbers
  are left out, as they take no memory.

  Args:
    flow: a flow.
    names: the offloaded stages.

  Returns:
    By node, for each value that it reads in host memory the value that it
    writes there.
  """
  found = {}
  for start, end in private(flow, names).items():
    for i, read, written in _updates(flow, start, end):
      found.setdefault(i, {})[read] = written
  return found


def _updates(flow, start: int, end: int) -> list[tuple[int, int, int]]:
  """Returns the calls that replace a carried value, one after another.

  Returns:
    Triples of a node, the value that it reads, and the value that replaces it;
    none if other nodes read one of these values.
  """
  if start == end or end not in flow.maker or not _is_array(flow.values[start]):
    return []
  last = flow.nodes[flow.maker[end]]
  output, found, now = last.writes.index(end), [], start
  while now != end:
    readers = flow.readers.get(now, ())
    if len(readers) != 1:
      return []
    node = flow.nodes[readers[0]]
    if node.stage is not last.stage or not _takes_all_rows(node):
      return []
    after = node.writes[output]
    found.append((readers[0], now, after))
    # All calls have the value at the same place among their arguments.
    first = flow.nodes[found[0][0]].reads.index(start)
    if node.reads.count(now) > 1 or node.reads.index(now) != first:
      return []
    if _kind(flow.values[after]) != _kind(flow.values[start]):
      return []
    now = after
  return found


def _is_array(value: graph.Value) -> bool:
  """Whether a value has dimensions, and is of numbers."""
  return bool(value.shape) and isinstance(value.dtype, np.dtype)


def _kind(value: graph.Value):
  return value.shape, value.dtype, value.letters


def _takes_all_rows(node: graph.Node) -> bool:
  """Whether a call is compiled, is no loop, and takes all rows at once."""
  if graph.is_plumbing(node) or node.body or node.asynchronous:
    return False
  return node.stage.grain == 'batch' and not node.stage.host
