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
from planner.ir import plan as plan_lib
from planner.lower import program


def order(flow: graph.Flow, plan, cost) -> graph.Flow:
  """Returns the flow with its nodes in the order of a greedy schedule.

  Args:
    flow: a flow, cut as the plan says.
    plan: the plan.
    cost: a `ir.cost.Cost`; only `seconds` and `transfer` are used.
  """
  return _permuted(flow, numbers(flow, plan, cost))


def numbers(flow: graph.Flow, plan, cost) -> plan_lib.Order:
  """Returns the numbers of the nodes in the order of a greedy schedule.

  The arguments are those of `order`.
  """
  bodies = {
    i: numbers(node.body, plan, cost)
    for i, node in enumerate(flow.nodes)
    if node.body
  }
  return tuple(
    (i, bodies[i]) if i in bodies else i for i in _greedy(flow, plan, cost)
  )


def arranged(flow: graph.Flow, order: plan_lib.Order) -> graph.Flow:
  """Returns the flow with its nodes in the order of a plan.

  Raises:
    ValueError: if the order does not have every node once, or has a node before
      another that it waits for.
  """
  _check(flow, order)
  return _permuted(flow, order)


def _check(flow, order):
  """Refuses the order of another flow."""
  bodies = _bodies(order)
  done = [one if isinstance(one, int) else one[0] for one in order]
  loops = {i for i, node in enumerate(flow.nodes) if node.body}
  if sorted(done) != [*range(len(flow.nodes))] or bodies.keys() != loops:
    raise ValueError(
      f'The order of the plan is of {len(done)} calls, {len(bodies)} of them '
      f'loops, and the step has {len(flow.nodes)} calls, {len(loops)} of them '
      'loops: the recipe or the pieces were changed. Remove `order` from the '
      'plan, or plan again.'
    )
  at = {i: n for n, i in enumerate(done)}
  for i, before in enumerate(_makers(flow)):
    if any(at[j] > at[i] for j in before):
      raise ValueError(
        f'The order of the plan has {flow.nodes[i].name} before a call that '
        'it waits for: the recipe was changed. Remove `order` from the plan, '
        'or plan again.'
      )
  for i, body in bodies.items():
    _check(flow.nodes[i].body, body)


def _permuted(flow, order) -> graph.Flow:
  """Returns the flow with its nodes, and those of loops, in an order."""
  nodes = list(flow.nodes)
  for i, body in _bodies(order).items():
    inner = _permuted(nodes[i].body, body)
    nodes[i] = dataclasses.replace(nodes[i], body=inner)
  done = (one if isinstance(one, int) else one[0] for one in order)
  return dataclasses.replace(flow, nodes=tuple(nodes[i] for i in done))


def _bodies(order) -> dict[int, plan_lib.Order]:
  """Returns the orders of the bodies of loops, by the number of the loop."""
  return dict(one for one in order if not isinstance(one, int))


def _greedy(flow: graph.Flow, plan, cost) -> list[int]:
  """Returns the numbers of the nodes, those within loops excepted."""
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
  return done


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
