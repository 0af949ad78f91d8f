"""Lower bounds on the seconds of a step, for many plans at once.

A step takes at least as long as its longest path. It also takes at least as
long as a place needs for all its nodes, plus the earliest start of any of them
and the least time that must follow: the one-machine bound of job shops
(Carlier 1982). The same holds for the nodes before a point where several paths
meet. The bounds are admissible: they hold for every order of a place's nodes,
and each node counts with the least seconds that the open choices allow.

Arrays are [N, K]: one row a node, one column a plan or a set of plans.
"""

import functools

import numpy as np

from planner.ir import graph


class Paths:
  """A flow's edges in one direction.

  Attributes:
    before: for each node, pairs `(earlier node, index of the edge)`.
    after: for each node, pairs `(later node, index of the edge)`.
    order: the nodes, earlier ones first.
    meets: for each node at which several paths meet, all nodes before it. Left
      out are nodes with one edge from a node that all their others are before:
      no bound at them is above that of the path along this edge, unless a value
      takes long along another.
    meet: the number of each of these nodes.
    calls: for each of these, the calls of each stage that is called more than
      once. All calls of a stage are at one place.
  """

  def __init__(self, before, after, order, names, chained):
    self.before, self.after, self.order = before, after, order
    ancestors = {}
    for i in order:
      ancestors[i] = set().union(*(ancestors[j] | {j} for j, _ in before[i]))
    rank = {i: at for at, i in enumerate(order)}

    def joins(i):
      made = {j for j, _ in before[i]}
      return made - ancestors[max(made, key=rank.get)] if made else made

    self.meets = {
      i: np.array(sorted(ancestors[i], key=rank.get))
      for i in order
      if len(joins(i)) > 1 and i not in chained
    }
    self.meet = {i: number for number, i in enumerate(self.meets)}
    self.calls = {i: _calls(names, there) for i, there in self.meets.items()}

  def heads(self, seconds, own, absent, least, delays):
    """Returns the earliest start of every node, [N, K].

    Args:
      seconds: time of each node, [N, K].
      own: at each of the P places, the seconds of its own nodes, and 0 for
        others, [P, N, K].
      absent: infinity where a place does not have the node, else 0, [P, N, K].
      least: time before a node that is not in the graph, [N, K] or 0.
      delays: time along each edge, [E, K]; None for none.
    """
    head = np.zeros_like(seconds) + least
    left = self._left(seconds, delays)
    for i in self.order:
      for j, e in self.before[i]:
        arrival = head[j] + seconds[j]
        if delays is not None:
          arrival += delays[e]
        np.maximum(head[i], arrival, out=head[i])
      if i in self.meets:
        there = self.meets[i]
        to_i, gone = left[there, self.meet[i]], absent[:, there]
        first = (head[there] + gone).min(1)
        last = (to_i + gone).min(1)
        work = first + own[:, there].sum(1) + last
        work[first == np.inf] = 0.0
        np.maximum(head[i], work.max(0), out=head[i])
        for rows in self.calls[i]:
          calls = there[rows]
          work = head[calls].min(0) + seconds[calls].sum(0) + to_i[rows].min(0)
          np.maximum(head[i], work, out=head[i])
    return head

  def _left(self, seconds, delays):
    """Returns seconds from the end of each node to each meeting point.

    The result is [N, meeting points, K], −infinity where no path leads there.
    """
    left = np.full((len(seconds), len(self.meets), seconds.shape[1]), -np.inf)
    for j in self.order[::-1]:
      for k, e in self.after[j]:
        path = left[k] + seconds[k]
        if k in self.meet:
          path[self.meet[k]] = 0.0
        if delays is not None:
          path += delays[e]
        np.maximum(left[j], path, out=left[j])
    return left


def _calls(names, there) -> list[np.ndarray]:
  """Returns the rows of `there` of each stage with several calls."""
  rows = {}
  for row, i in enumerate(there):
    rows.setdefault(names[i], []).append(row)
  rows.pop(None, None)
  return [np.array(calls) for calls in rows.values() if len(calls) > 1]


class Section:
  """The part of a flow that depends on some of its nodes.

  Attributes:
    nodes: indices of the nodes.
    end: index of the last node of a loop through carried values; None for the
      section of a whole step.
    steps: number of steps after which the loop starts again.
    carried: the value of `end` that the loop's first nodes read then.
    readers: these first nodes.
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
        # Totals form a chain, so the bound at the last one suffices.
        if _is_total(flow.nodes[j]) and _is_total(flow.nodes[i]):
          chained.add(row[j])
    names = [
      None if graph.is_plumbing(flow.nodes[i]) else flow.nodes[i].name
      for i in self.nodes
    ]
    self.forth = Paths(before, after, range(n), names, chained)
    self.back = Paths(after, before, range(n)[::-1], names, chained)

  def bound(self, seconds, at, delays, wait, enough):
    """Returns a lower bound on the seconds of the section, [K].

    Args:
      seconds: time of every node of the flow, [N, K].
      at: index of every node's place, [N, K].
      delays: time along each edge, [E, K]; None for none.
      wait: time before every node if the section has an end, else after it,
        [N, K]; None for none.
      enough: bounds that reach this are not refined further.
    """
    seconds, at = seconds[self.nodes], at[self.nodes]
    wait = 0.0 if wait is None else wait[self.nodes]
    here = at == np.arange(at.max() + 1)[:, None, None]
    own, absent = np.where(here, seconds, 0.0), np.where(here, 0.0, np.inf)
    if self.end is not None:
      end = self.nodes.index(self.end)
      head = self.forth.heads(seconds, own, absent, wait, delays)
      return head[end] + seconds[end]
    head = self.forth.heads(seconds, own, absent, 0.0, delays)
    tail = self.back.heads(seconds, own, absent, wait, delays)
    bound = (head + seconds + tail).max(0)
    some = np.flatnonzero(bound < enough)
    at_place = _one_place(
      own[:, :, some], absent[:, :, some], head[:, some], tail[:, some]
    )
    bound[some] = np.maximum(bound[some], at_place)
    return bound


class LowerBounds:
  """Lower bounds for plans of a cut flow.

  Attributes:
    edges: pairs of indices of nodes, of which the second reads the first.
    step: the section that depends on the inputs of a step.
    outside: the worker of each node, [N]: zero for its place, else an index of
      the stage. Calls of an asynchronous stage run one after another on a
      background worker of their own.
  """

  def __init__(self, flow: graph.Flow):
    self.edges = [
      (j, i)
      for i, node in enumerate(flow.nodes)
      for j in dict.fromkeys(
        flow.maker[v] for v in node.reads if v in flow.maker
      )
    ]
    names = [node.name if node.asynchronous else None for node in flow.nodes]
    stages = [None, *dict.fromkeys(filter(None, names))]
    self.outside = np.array([stages.index(name) for name in names])
    begins = {i for v in flow.inputs for i in flow.readers.get(v, ())}
    self.step = Section(flow, self.edges, self._after(begins))
    self._flow = flow

  @functools.cached_property
  def loops(self) -> list[Section]:
    """The sections that depend on what an earlier step carries over.

    A long flow takes seconds to divide into them, and only bounds of steps that
    overlap read them.
    """
    flow, visited, ends = self._flow, set(), dict(self._flow.carry)
    loops = []
    for start in ends:
      readers, end, steps = flow.readers.get(start, ()), ends[start], 1
      while end in ends and ends[end] != end and steps <= len(ends):
        end, steps = ends[end], steps + 1  # A delay line.
      maker = flow.maker.get(end)
      nodes = self._after(readers)
      if maker in nodes and (readers, maker, steps) not in visited:
        visited.add((readers, maker, steps))
        nodes &= self._before(maker)
        loops.append(
          Section(flow, self.edges, nodes, maker, steps, end, readers)
        )
    return loops

  def loops_beside(self, share: float) -> list[Section]:
    """Returns the loops that bound a step besides its own section.

    Args:
      share: share of a step that passes before the next one begins.
    """
    # If it passes whole, loops are part of the step.
    return self.loops if share < 1 or not self.step.nodes else []

  def _after(self, nodes) -> set[int]:
    """Returns nodes and everything that depends on them."""
    found = set(nodes)
    for j, i in self.edges:  # Earlier ones first.
      if j in found:
        found.add(i)
    return found

  def _before(self, node: int) -> set[int]:
    """Returns a node and everything that it depends on."""
    found = {node}
    for j, i in reversed(self.edges):  # Later ones first.
      if i in found:
        found.add(j)
    return found

  def period(self, seconds, at, share, delays=None, waits=None, enough=np.inf):
    """Returns lower bounds on the seconds from step to step, [K].

    Args:
      seconds: time of every node, [N, K].
      at: index of every node's place, [N, K].
      share: share of a step that passes before the next one begins.
      delays: transfer time along each of `edges`, [E, K].
      waits: time after every node before a step ends, [N, K]; then for each
        of `loops_beside(share)`, time before every node after the loop has
        started, [N, K].
      enough: bounds that reach this are not refined further.
    """
    at = at + (at.max() + 1) * self.outside[:, None]
    bound = busiest(seconds, at)
    loops = self.loops_beside(share)
    waits = waits or [None] * (1 + len(loops))
    sections = [(self.step, share, waits[0])]
    sections += [
      (loop, 1 / loop.steps, wait)
      for loop, wait in zip(loops, waits[1:], strict=True)
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
  """The one-machine bound, over all sets of nodes with large heads or tails."""
  bound = np.zeros(own.shape[2])
  for one, other in ((head, tail), (tail, head)):
    one, other = one + absent, other + absent
    order = np.argsort(-one, axis=1)
    one, other, work = (
      np.take_along_axis(x, order, 1) for x in (one, other, own)
    )
    total = one + np.cumsum(work, 1) + np.minimum.accumulate(other, 1)
    total[~np.isfinite(total)] = 0.0
    bound = np.maximum(bound, total.max((0, 1), initial=0.0))
  return bound


def busiest(seconds, at):
  """Returns the busy seconds of the busiest place, [K]."""
  return np.max(
    [
      np.where(at == place, seconds, 0.0).sum(0)
      for place in range(at.max() + 1)
    ],
    axis=0,
  )
