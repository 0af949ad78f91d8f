"""Orders the nodes of a flow by list scheduling: earliest start first.

Streaming should take a piece through every stage before the next piece. A loop
over time should take every piece one time step before the next time step. Both
follow from one rule: a place never waits for one node while another could run.
Among nodes that could run, the earliest piece goes first, since other places
wait for its results. Ties go to the longest remaining path (HEFT, Topcuoglu
2002); this alone would finish a long stage before a short one that follows it.

An asynchronous call does not occupy its place. Calls of one stage run one after
another in the background, and the place is free until it needs the result. All
asynchronous calls start as soon as their inputs are there: an inference engine
gets all pieces at once, and a policy acts on one piece while simulators step
another.
"""

import collections
import dataclasses
import heapq

from planner.ir import graph
from planner.lower import program


def order(flow: graph.Flow, plan, cost) -> graph.Flow:
  """Returns the flow with its nodes in the order of a greedy schedule.

  Args:
    flow: a flow, cut as the plan says.
    plan: the plan.
    cost: a `costs.cost.Cost`; only `seconds` and `transfer` are used.
  """
  flow = _with_bodies(flow, plan, cost)
  where = program.locate(flow, plan)
  # A place is busy while another place uses its shared devices.
  there = [
    tuple(dict.fromkeys(plan.lease_devices(place) or place for place in part))
    for part in program.parts(flow, plan)
  ]
  n = len(flow.nodes)
  takes = [
    _seconds(flow, flow.nodes[i], where[i], plan, cost) for i in range(n)
  ]
  makers = _makers(flow)
  after, to_go = _to_go(makers, takes)
  end, free, done = {}, collections.defaultdict(float), []

  def arrival(i):
    """Returns when the last input of a node arrives at its place."""
    made = [(v, flow.maker[v]) for v in flow.nodes[i].reads if v in flow.maker]
    return max(
      (end[j] + cost.transfer(flow, v, where[j], where[i]) for v, j in made),
      default=0.0,
    )

  def background_end(i, now):
    """Returns when an asynchronous call that starts now ends."""
    worker = where[i], flow.nodes[i].name
    free[worker] = max(now, free[worker]) + takes[i]
    return free[worker]

  left = [len(before) for before in makers]
  ready = {i: 0.0 for i in range(n) if not left[i]}
  ready |= {
    i: background_end(i, 0.0) for i in ready if flow.nodes[i].asynchronous
  }

  def priority(i, start):
    return start, flow.nodes[i].piece[0], -to_go[i], i

  heap = [priority(i, start) for i, start in ready.items()]
  heapq.heapify(heap)
  while heap:
    start, *_, i = heapq.heappop(heap)
    now = max(ready[i], *(free[place] for place in there[i]))
    if now > start:
      heapq.heappush(heap, priority(i, now))
      continue
    end[i] = now + takes[i] * (not flow.nodes[i].asynchronous)
    free |= dict.fromkeys(there[i], end[i])
    done.append(i)
    for j in after[i]:
      left[j] -= 1
      if not left[j]:
        ready[j] = arrival(j)
        if flow.nodes[j].asynchronous:
          ready[j] = background_end(j, ready[j])
        heapq.heappush(heap, priority(j, ready[j]))
  return dataclasses.replace(flow, nodes=tuple(flow.nodes[i] for i in done))


def _makers(flow) -> list[set[int]]:
  """Returns the nodes that each node waits for."""
  makers = [
    {flow.maker[v] for v in node.reads if v in flow.maker}
    for node in flow.nodes
  ]
  first = _first(flow, makers)
  return [
    before | first if node.asynchronous else before
    for before, node in zip(makers, flow.nodes, strict=True)
  ]


def _to_go(makers, takes) -> tuple[list[list[int]], list[float]]:
  """Returns the readers of each node, and its longest path to the end."""
  after, to_go = [[] for _ in makers], list(takes)
  for i, before in enumerate(makers):
    for j in before:
      after[j].append(i)
  for i in reversed(range(len(takes))):
    to_go[i] += max((to_go[j] for j in after[i]), default=0.0)
  return after, to_go


def _first(flow, makers) -> set[int]:
  """Returns the nodes before asynchronous calls that do not wait for one."""
  before, late = set(), set()
  for i in reversed(range(len(flow.nodes))):
    if i in before or flow.nodes[i].asynchronous:
      before |= makers[i]
  for i in range(len(flow.nodes)):
    if flow.nodes[i].asynchronous or makers[i] & late:
      late.add(i)
  return before - late


def _seconds(flow, node, place, plan, cost) -> float:
  """Returns the seconds of a node; for a loop, those of its busiest place."""
  if not node.body:
    return cost.seconds(flow, node, place)
  busy = collections.Counter()
  where = program.locate(node.body, plan)
  for inner, there in zip(node.body.nodes, where, strict=True):
    busy[there] += _seconds(node.body, inner, there, plan, cost)
  return graph.rounds(node) * max(busy.values(), default=0.0)


def _with_bodies(flow, plan, cost) -> graph.Flow:
  """Orders the bodies of the loops of a flow."""
  nodes = [
    dataclasses.replace(node, body=order(node.body, plan, cost))
    if node.body
    else node
    for node in flow.nodes
  ]
  return dataclasses.replace(flow, nodes=tuple(nodes))
