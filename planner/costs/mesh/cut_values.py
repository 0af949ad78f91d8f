"""Values that a place has twice for a moment: whole, and in pieces."""

import collections

from planner.ir import graph
from planner.lower import cut


class CutValues:
  """The values of a flow that are split or joined where its batch is cut.

  Both need the memory of a value twice. A value that some stages read whole,
  and others in pieces, is there twice for longer.
  """

  def __init__(self, flow: graph.Flow, pieces: int):
    """Takes a flow as recorded, and the number of pieces of its batch."""
    self._flow, self._split, self._joined = flow, set(), set()
    of_piece, self._whole = {}, collections.defaultdict(set)
    self._parts = collections.defaultdict(set)
    nodes = cut.cut(flow, pieces).nodes
    for node in nodes:
      if node.stage is cut.JOIN:
        self._joined.update(node.writes)
        of_piece |= dict.fromkeys(node.reads, node.writes[0])
      elif graph.is_plumbing(node) and node.stage.name == 'split':
        self._split.update(node.reads)
        of_piece |= dict.fromkeys(node.writes, node.reads[0])
    both = self._split | self._joined
    for node in nodes:
      if not graph.is_plumbing(node):
        for v in node.reads:
          if v in both:
            self._whole[v].add(node.name)
          if v in of_piece:
            self._parts[of_piece[v]].add(node.name)

  def at(self, stages: frozenset[str]) -> frozenset[int]:
    """Returns those that may be there twice at a place of some stages.

    A value is split where it is made, or read if it is given, and joined where
    it is read, or made if no stage reads it.
    """
    found = set()
    for v in self._split | self._joined:
      whole, parts = self._whole[v] & stages, self._parts[v] & stages
      maker = self._flow.maker.get(v)
      is_made = maker is not None
      is_here = is_made and self._flow.nodes[maker].name in stages
      is_split = v in self._split and (
        is_here or not is_made and (whole or parts)
      )
      is_joined = v in self._joined and (
        whole or is_here and not self._whole[v]
      )
      if is_split or is_joined or whole and parts:
        found.add(v)
    return frozenset(found)
