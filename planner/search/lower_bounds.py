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

from planner.ir import graph


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


class Section:
  """Nodes of a flow that cannot start before some of them have.

  Attributes:
    nodes: their numbers.
    end: number of the node that is of interest; None if all are.
    steps: how many steps on the section begins again when it has ended.
    carried: what `end` makes that the section's first nodes read then.
    readers: those.
  """

  def __init__(
    self, flow, edges, nodes, end=None, steps=1, carried=None, readers=()
  ):
    self.nodes, self.end, self.steps = sorted(nodes), end, steps
    self.carried, self.readers = carried, readers
    row = {node: at for at, node in enumerate(self.nodes)}
    n = len(row)
    before, after = [[] for _ in range(n)], [[] for _ in range(n)]
    chained = set()
    for e, (j, i) in enumerate(edges):
      if j in row and i in row:
        before[row[i]].append((row[j], e))
        after[row[j]].append((row[i], e))
        # Sums are added one after another: the last of them says it all.
        if _is_total(flow.nodes[j]) and _is_total(flow.nodes[i]):
          chained.add(row[j])
    names = [
      None if graph.is_plumbing(flow.nodes[i]) else flow.nodes[i].name
      for i in self.nodes
    ]
    self.forth = Paths(before, after, range(n), names, chained)
    self.back = Paths(after, before, range(n)[::-1], names, chained)

  def bound(self, seconds, at, delays, wait, enough):
    """The least seconds from the section's beginning to its end, [K].

    Args:
      seconds: of every node of the flow, [N, K].
      at: the number of every node's place, [N, K].
      delays: of the edges, [E, K]; None for none.
      wait: of every node, [N, K]: before it, if the section has an end, else
        after it; None for none.
      enough: bounds that reach this are good enough.
    """
    seconds, at = seconds[self.nodes], at[self.nodes]
    wait = 0.0 if wait is None else wait[self.nodes]
    shares = []
    for place in range(at.max() + 1):
      here = at == place
      shares.append((np.where(here, seconds, 0.0), np.where(here, 0.0, np.inf)))
    if self.end is not None:
      end = self.nodes.index(self.end)
      head = self.forth.heads(seconds, shares, wait, delays)
      return head[end] + seconds[end]
    head = self.forth.heads(seconds, shares, 0.0, delays)
    tail = self.back.heads(seconds, shares, wait, delays)
    bound = (head + seconds + tail).max(0)
    some = np.flatnonzero(bound < enough)
    for own, absent in shares:
      parts = [x[:, some] for x in (own, absent, head, tail)]
      bound[some] = np.maximum(bound[some], _one_place(*parts))
    return bound


class Floor:
  """Bounds for plans of a flow that has been cut.

  Attributes:
    edges: pairs of numbers of nodes, the second of which reads the first.
    step: what cannot start before the inputs of a step are there.
    loops: what cannot start before an earlier step has made what it reads.
    outside: who does what each node is, [N]: zero for its place, else a number
      of the stage. What a place begins ahead of its turn keeps another, which
      has one call of the stage to make at a time as well.
  """

  def __init__(self, flow: graph.Flow):
    self.edges = [
      (j, i)
      for i, node in enumerate(flow.nodes)
      for j in dict.fromkeys(
        flow.maker[v] for v in node.reads if v in flow.maker
      )
    ]
    ahead = [node.name if node.asynchronous else None for node in flow.nodes]
    stages = [None, *dict.fromkeys(filter(None, ahead))]
    self.outside = np.array([stages.index(name) for name in ahead])
    begins = {i for v in flow.inputs for i in flow.readers.get(v, ())}
    self.step = Section(flow, self.edges, self._after(begins))
    self.loops, seen, ends = [], set(), dict(flow.carry)
    for start in ends:
      readers, end, steps = flow.readers.get(start, ()), ends[start], 1
      while end in ends and ends[end] != end and steps <= len(ends):
        end, steps = ends[end], steps + 1  # A delay line.
      maker = flow.maker.get(end)
      nodes = self._after(readers)
      if maker in nodes and (readers, maker, steps) not in seen:
        seen.add((readers, maker, steps))
        nodes = {i for i in nodes if maker in self._after([i])}
        self.loops.append(
          Section(flow, self.edges, nodes, maker, steps, end, readers)
        )

  def _after(self, nodes) -> set[int]:
    """Nodes, and all that read what they make."""
    found = set(nodes)
    for j, i in self.edges:  # Earlier ones first.
      if j in found:
        found.add(i)
    return found

  def period(self, seconds, at, share, delays=None, waits=None, enough=np.inf):
    """The least seconds from step to step, [K].

    Args:
      seconds: of every node, [N, K].
      at: the number of every node's place, [N, K].
      share: of a step, that passes before the next is begun.
      delays: of `edges`, between the places they connect, [E, K].
      waits: of every node, [N, K]: after it and before the end of a step; then
        for each loop, before it and after the loop has begun.
      enough: bounds that reach this are good enough.
    """
    at = at + (at.max() + 1) * self.outside[:, None]
    bound = busiest(seconds, at)
    waits = waits or [None] * (1 + len(self.loops))
    sections = [(self.step, share, waits[0])]
    if share < 1 or not self.step.nodes:  # Else loops are part of the step.
      sections += [
        (loop, 1 / loop.steps, wait)
        for loop, wait in zip(self.loops, waits[1:], strict=True)
      ]
    for section, times, wait in sections:
      some = np.flatnonzero(bound < enough)
      if len(some) and times and section.nodes:
        more = section.bound(
          seconds[:, some],
          at[:, some],
          delays if delays is None else delays[:, some],
          wait if wait is None else wait[:, some],
          enough / times,
        )
        bound[some] = np.maximum(bound[some], times * more)
    return bound


def _is_total(node) -> bool:
  return graph.is_plumbing(node) and node.stage.name == 'total'


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
