"""Which values a place has during each of its calls, in every possible order.

A plan of one place runs the calls of a step as they are recorded. With several
places, asynchronous calls or pieces of a batch, a schedule decides the order,
by costs that differ from plan to plan. Then a value counts during every call
that may run while it is in memory: all but those that have certainly ended
before it is made, or that certainly begin after its last use.

Sets of nodes are integers, with a bit for each node.
"""

from collections.abc import Iterable
import functools
import operator

from planner.ir import graph


class Precedence:
  """Which nodes of a flow have certainly ended before others begin.

  Attributes:
    before: for each node, those that have ended when it begins.
    after: for each node, those that begin when it has ended.
  """

  def __init__(self, flow: graph.Flow, is_ordered: bool, in_pieces: bool):
    """Takes a flow.

    Args:
      flow: as recorded.
      is_ordered: whether its nodes run in their order.
      in_pieces: whether its batch passes in pieces, so that a stage may begin
        before an earlier one has ended.
    """
    n = len(flow.nodes)
    self.before = [(1 << i) - 1 for i in range(n)]
    if in_pieces or not is_ordered:
      self.before = _ended(flow, in_pieces)
    self.after = [0] * n
    for i, some in enumerate(self.before):
      for j in bits(some):
        self.after[j] |= 1 << i
    self.during = functools.cache(self._during)

  def _during(self, nodes: tuple[int, ...]) -> int:
    """Returns the nodes that may run from the first to the last of some."""
    earlier = functools.reduce(operator.and_, (self.before[i] for i in nodes))
    later = functools.reduce(operator.and_, (self.after[i] for i in nodes))
    return ~(earlier | later) & self.all

  def since(self, node: int) -> int:
    """Returns the nodes that may run when a node begins, or later."""
    return ~self.before[node] & self.all

  def has_ended(self, node: int, when: int) -> bool:
    """Whether a node has certainly ended when another one begins."""
    return bool(self.before[when] >> node & 1)

  @property
  def all(self) -> int:
    return (1 << len(self.before)) - 1


def bits(number: int) -> Iterable[int]:
  """Yields the numbers of the bits that are set."""
  while number:
    low = number & -number
    yield low.bit_length() - 1
    number ^= low


def _ended(flow: graph.Flow, in_pieces: bool) -> list[int]:
  """Returns the nodes all of whose calls end before any call of each node."""
  before = []
  complete = []  # Nodes that have ended when all calls of a node have.
  for i, node in enumerate(flow.nodes):
    before.append(0)
    complete.append(0)
    for v in node.reads:
      j = flow.maker.get(v)
      if j is None:
        continue
      made = complete[j] | 1 << j
      if in_pieces and flow.nodes[j].stage.grain == 'split':
        made = before[j]  # A run of rows has some of the pieces.
      complete[i] |= made
      # The first piece of some rows waits for no other piece.
      by_piece = in_pieces and v in node.rows and _is_cut(node)
      by_piece = by_piece and flow.nodes[j].stage.grain in ('row', 'split')
      by_piece = by_piece and _is_cut(flow.nodes[j])
      before[i] |= before[j] if by_piece else made
  return before


def _is_cut(node: graph.Node) -> bool:
  """Whether a node may be called for each piece of a batch."""
  return bool(node.rows) and node.stage.grain in ('row', 'sum', 'split')
