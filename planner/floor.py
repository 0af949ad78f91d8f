"""Lower bounds on the seconds of a step, for many plans at once.

A step cannot end before its longest path has been walked, nor a place before
it has done all its work, beginning with what can come first and followed by
what must come after: the one-machine bound of job shops (Carlier 1982), here
also for what must be done before several paths meet again. Whatever order the
nodes of a place run in, and whatever other choices are still open, the bound
holds: each node is given the least seconds that the open choices allow.

Arrays are [N, K]: a row a node, a column a plan, or a set of plans.
"""

import numpy as np

from planner import graph


class Paths:
  """A flow's edges, seen from one end.

  Attributes:
    before: of each node, `(earlier node, number of the edge)`.
    after: of each node, likewise.
    order: nodes, earlier ones first.
    meets: nodes at which several paths meet, and all nodes before those.
    calls: of those, the calls of each stage that is called more than once:
      wherever it is, it is in one place.
  """

  def __init__(self, before, after, order, names, chained):
    self.before, self.after, self.order = before, after, order
    ancestors = {}
    for i in order:
      ancestors[i] = set().union(*(ancestors[j] | {j} for j, _ in before[i]))
    rank = {i: at for at, i in enumerate(order)}
    self.meets = {
      i: np.array(sorted(ancestors[i], key=rank.get))
      for i in order
      if len(before[i]) > 1 and i not in chained
    }
    self.calls = {i: _calls(names, there) for i, there in self.meets.items()}

  def heads(self, seconds, shares, least, delays):
    """How long after the beginning a node may start, at the earliest.

    Args:
      seconds: of each node, [N, K].
      shares: of each place, the seconds of its own nodes, and where it has
        them, both [N, K].
      least: what a node has before it that is not in the graph, [N, K] or 0.
      delays: of the edges, [E, K]; None for none.
    """
    head = np.zeros_like(seconds) + least
    for i in self.order:
      for j, e in self.before[i]:
        come = head[j] + seconds[j]
        if delays is not None:
          come = come + delays[e]
        np.maximum(head[i], come, out=head[i])
      if i in self.meets:
        there = self.meets[i]
        left = self._left(i, there, seconds, delays)
        for own, absent in shares:
          gone = absent[there]
          first = (head[there] + gone).min(0)
          last = (left + gone).min(0)
          work = first + own[there].sum(0) + last
          np.maximum(head[i], np.where(first < np.inf, work, 0), out=head[i])
        for rows in self.calls[i]:
          calls = there[rows]
          work = head[calls].min(0) + seconds[calls].sum(0) + left[rows].min(0)
          np.maximum(head[i], work, out=head[i])
    return head

  def _left(self, i, there, seconds, delays):
    """Seconds from the end of each node `there` to the start of `i`."""
    row = {j: at for at, j in enumerate(there)}
    left = np.zeros((len(there), seconds.shape[1]))
    for j in reversed(there):
      for k, e in self.after[j]:
        if k == i:
          way = 0.0
        elif k in row:
          way = left[row[k]] + seconds[k]
        else:
          continue
        if delays is not None:
          way = way + delays[e]
        np.maximum(left[row[j]], way, out=left[row[j]])
    return left


def _calls(names, there) -> list[np.ndarray]:
  """The rows of `there` that are calls of one stage, for each with several."""
  rows = {}
  for row, i in enumerate(there):
    rows.setdefault(names[i], []).append(row)
  rows.pop(None, None)
  return [np.array(calls) for calls in rows.values() if len(calls) > 1]


class Floor:
  """Bounds for plans of a flow that has been cut.

  Attributes:
    nodes: numbers of the nodes that cannot start before a step has begun.
    edges: pairs of numbers of such nodes, the second of which reads the first.
  """

  def __init__(self, flow: graph.Flow):
    inputs, timed = set(flow.inputs), {}
    before = {}
    for i, node in enumerate(flow.nodes):
      makers = dict.fromkeys(
        flow.maker[v] for v in node.reads if v in flow.maker
      )
      before[i] = [j for j in makers if j in timed]
      if before[i] or inputs.intersection(node.reads):
        timed[i] = len(timed)
    self.nodes = list(timed)
    self.edges = [(j, i) for i in timed for j in before[i]]
    n = len(timed)
    ahead, behind = [[] for _ in range(n)], [[] for _ in range(n)]
    for e, (j, i) in enumerate(self.edges):
      ahead[timed[i]].append((timed[j], e))
      behind[timed[j]].append((timed[i], e))
    # Sums are added one after another: the last of them says it all.
    chained = {
      timed[j]
      for j, i in self.edges
      if flow.nodes[j].stage.name == flow.nodes[i].stage.name == 'total'
      and graph.is_plumbing(flow.nodes[j])
    }
    names = [
      None if graph.is_plumbing(node) else node.name
      for node in (flow.nodes[i] for i in self.nodes)
    ]
    self.forth = Paths(ahead, behind, range(n), names, chained)
    self.back = Paths(behind, ahead, range(n)[::-1], names, chained)

  def step(self, seconds, at, delays=None, last=0.0, enough=np.inf):
    """The least seconds from the beginning of a step to its end, [K].

    Args:
      seconds: of every node of the flow, [N, K].
      at: the number of every node's place, [N, K].
      delays: of `edges`, between the places they connect, [E, K].
      last: between the end of a node and the step's, [N, K].
      enough: bounds that reach this are good enough.
    """
    if not self.nodes:
      return np.zeros(seconds.shape[1])
    seconds, at = seconds[self.nodes], at[self.nodes]
    last = last if np.isscalar(last) else last[self.nodes]
    shares = []
    for place in range(at.max() + 1):
      here = at == place
      shares.append((np.where(here, seconds, 0.0), np.where(here, 0.0, np.inf)))
    head = self.forth.heads(seconds, shares, 0.0, delays)
    tail = self.back.heads(seconds, shares, last, delays)
    bound = (head + seconds + tail).max(0)
    some = np.flatnonzero(bound < enough)
    for own, absent in shares:
      parts = [x[:, some] for x in (own, absent, head, tail)]
      bound[some] = np.maximum(bound[some], _one_place(*parts))
    return bound


def _one_place(own, absent, head, tail):
  """The one-machine bound over nodes that start late, or end early."""
  bound = np.zeros(own.shape[1])
  for one, other in ((head, tail), (tail, head)):
    one, other = one + absent, other + absent
    order = np.argsort(-one, axis=0)
    one, other, work = (
      np.take_along_axis(x, order, 0) for x in (one, other, own)
    )
    total = one + np.cumsum(work, 0) + np.minimum.accumulate(other, 0)
    total[~np.isfinite(total)] = 0.0
    bound = np.maximum(bound, total.max(0, initial=0.0))
  return bound


def busiest(seconds, at):
  """What the place with the most to do has to do in a step, [K]."""
  return np.max(
    [
      np.where(at == place, seconds, 0.0).sum(0)
      for place in range(at.max() + 1)
    ],
    axis=0,
  )
