"""Orders the nodes of a flow for a plan: whoever can start first goes first.

Streaming wants a piece taken through every stage before the next; a loop over
time wants every piece taken one step before the next step. Both are the same
rule: a place never waits for one node while another could run. Of those that
could, it runs the one of the earliest piece, since other places wait for what
becomes of it; then the one with the longest way to go (HEFT, Topcuoglu 2002),
which alone would finish a long stage before a short one that follows it.

What may begin ahead of its turn keeps no place: it is done elsewhere, one call
of a stage after the other, and a place is free until it waits for it. It does
so when all that can be begun so has what it reads: an engine is given all
pieces at once, and while simulators step one piece a policy acts on another.
"""

import collections
import dataclasses
import heapq

from planner.ir import graph
from planner.lower import program


def order(flow: graph.Flow, plan, cost) -> graph.Flow:
  """Returns the flow with its nodes in the order of a greedy schedule.

  Args:
    flow: cut as the plan says.
    plan: where its stages run.
    cost: as `costs.cost.Cost`: `seconds` of nodes, `transfer` of values.
  """
  flow = _with_bodies(flow, plan, cost)
  where = program.locate(flow, plan)
  # Who shares devices is busy while another has them.
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
    """When the last of what a node reads is at its place."""
    made = [(v, flow.maker[v]) for v in flow.nodes[i].reads if v in flow.maker]
    return max(
      (end[j] + cost.transfer(flow, v, where[j], where[i]) for v, j in made),
      default=0.0,
    )

  def began(i, now):
    """When what is begun now has ended elsewhere."""
    outside = where[i], flow.nodes[i].name
    free[outside] = max(now, free[outside]) + takes[i]
    return free[outside]

  left = [len(before) for before in makers]
  ready = {i: 0.0 for i in range(n) if not left[i]}
  ready |= {i: began(i, 0.0) for i in ready if flow.nodes[i].asynchronous}

  def turn(i, start):
    return start, flow.nodes[i].piece[0], -to_go[i], i

  heap = [turn(i, start) for i, start in ready.items()]
  heapq.heapify(heap)
  while heap:
    start, *_, i = heapq.heappop(heap)
    now = max(ready[i], *(free[place] for place in there[i]))
    if now > start:
      heapq.heappush(heap, turn(i, now))
      continue
    end[i] = now + takes[i] * (not flow.nodes[i].asynchronous)
    free |= dict.fromkeys(there[i], end[i])
    done.append(i)
    for j in after[i]:
      left[j] -= 1
      if not left[j]:
        ready[j] = arrival(j)
        if flow.nodes[j].asynchronous:
          ready[j] = began(j, ready[j])
        heapq.heappush(heap, turn(j, ready[j]))
  return dataclasses.replace(flow, nodes=tuple(flow.nodes[i] for i in done))


def _makers(flow) -> list[set[int]]:
  """Nodes that each waits for."""
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
  """Nodes that read of each, and seconds from its start to the end of all."""
  after, to_go = [[] for _ in makers], list(takes)
  for i, before in enumerate(makers):
    for j in before:
      after[j].append(i)
  for i in reversed(range(len(takes))):
    to_go[i] += max((to_go[j] for j in after[i]), default=0.0)
  return after, to_go


def _first(flow, makers) -> set[int]:
  """Nodes that lead to what may begin ahead, and wait for nothing such."""
  before, late = set(), set()
  for i in reversed(range(len(flow.nodes))):
    if i in before or flow.nodes[i].asynchronous:
      before |= makers[i]
  for i in range(len(flow.nodes)):
    if flow.nodes[i].asynchronous or makers[i] & late:
      late.add(i)
  return before - late


def _seconds(flow, node, place, plan, cost) -> float:
  """Of a node; of a loop, those of its busiest place."""
  if not node.body:
    return cost.seconds(flow, node, place)
  busy = collections.Counter()
  where = program.locate(node.body, plan)
  for inner, there in zip(node.body.nodes, where, strict=True):
    busy[there] += _seconds(node.body, inner, there, plan, cost)
  return graph.rounds(node) * max(busy.values(), default=0.0)


def _with_bodies(flow, plan, cost) -> graph.Flow:
  """The flow with the bodies of its loops in order."""
  nodes = [
    dataclasses.replace(node, body=order(node.body, plan, cost))
    if node.body
    else node
    for node in flow.nodes
  ]
  return dataclasses.replace(flow, nodes=tuple(nodes))
