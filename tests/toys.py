"""Flows that nobody would run, and what their stages cost."""

import dataclasses
import math

import numpy as np

from planner import graph
from planner.search import exact


class Stage:
  """What a planner sees of a stage."""

  whole, group, host, ahead = (), 1, False, False

  def __init__(self, name, grain):
    self.name, self.grain = name, grain

  def merge(self, a, b):
    return a + b


def value(name='x', rows=8):
  return graph.Value(name, (rows,), np.dtype('float32'), ('B',))


def chain(*grains, carried=True):
  """A flow in which stages a, b, c, … follow each other.

  The last makes what the first reads in the next step, if `carried`.
  """
  n = len(grains)
  nodes = tuple(
    graph.Node(
      Stage('abcdef'[i], grain),
      (i,),
      (i + 1,),
      frozenset() if grain == 'batch' else frozenset({i}),
    )
    for i, grain in enumerate(grains)
  )
  carry, inputs, outputs = ((0, n),), (), ()
  if not carried:
    carry, inputs, outputs = (), (0,), (n,)
  return graph.Flow(nodes, (value(),) * (n + 1), inputs, outputs, carry)


def build(calls, carried):
  """A flow of named stages.

  Args:
    calls: for each, its name, grain, and the names of what it reads: stages, or
      'batch', or 'state.<stage>' for what a stage made a step ago.
    carried: stages that make a state.
  """
  ids = {'batch': 0} | {f'state.{s}': 1 + i for i, s in enumerate(carried)}
  values = [value(name) for name in ids]
  nodes, rowless = [], {ids[f'state.{s}'] for s in carried}
  for name, grain, reads in calls:
    ids[name] = len(values)
    values.append(value(name))
    reads = tuple(ids[r] for r in reads)
    rows = frozenset() if grain == 'batch' else frozenset(reads) - rowless
    if grain in ('batch', 'sum'):
      rowless.add(ids[name])
    nodes.append(graph.Node(Stage(name, grain), reads, (ids[name],), rows))
  used = {v for node in nodes for v in node.reads}
  outputs = tuple(ids[n] for n, _, _ in calls if ids[n] not in used)
  carry = tuple((ids[f'state.{s}'], ids[s]) for s in carried)
  return graph.Flow(tuple(nodes), tuple(values), (0,), outputs, carry)


class Known:
  """Costs by name; a piece costs its share.

  A call takes `crowded` times as long for every other place that runs one.
  """

  def __init__(self, seconds, transfer=0.0, switch=0.0, crowded=1.0):
    self.costs, self.move, self.change = seconds, transfer, switch
    self.crowded = crowded

  def seconds(self, flow, node, place):
    del flow, place
    return self.costs.get(node.name, 0.0) / node.piece[1]

  def transfer(self, flow, value, source, target):
    del flow, value, source, target
    return self.move

  def switch(self, flow, value, place):
    del flow, value, place
    return self.change

  def crowding(self, node, place, beside):
    del node, place
    return self.crowded ** len(beside)


class Synthetic:
  """Seconds ~ work / devices ** power + overhead; memory of shares.

  Attributes:
    work: seconds of each stage on one device.
    held: bytes that each stage holds on one device.
    alone: stages that run on one device only.
    meshes: how many ways to lay devices out; each costs a little more.
    crowded: how many times as long a call takes for each device that is busy
      beside it, up to two.
  """

  def __init__(
    self,
    work,
    *,
    power=0.9,
    overhead=0.0,
    move=0.0,
    change=0.0,
    held=None,
    capacity=math.inf,
    alone=(),
    meshes=1,
    crowded=1.0,
  ):
    self.work, self.power, self.overhead = work, power, overhead
    self.move, self.change, self.capacity = move, change, capacity
    self.held, self.alone, self.meshes = held or {}, alone, meshes
    self.crowded = crowded

  def axes(self, stages, devices):
    if devices == 1:
      return [()]
    if not set(self.alone).isdisjoint(stages):
      return []
    return [(('data', devices),), (('tensor', devices),)][: self.meshes]

  def seconds(self, flow, node, placement, rows):
    n = len(placement.devices)
    if graph.is_plumbing(node):
      return 0.0
    names = [name for name, _ in placement.axes]
    slower = 1.3 - 0.05 * len(node.name) if 'tensor' in names else 1.0
    calls = 1 if rows is None else 8 / rows / node.piece[1]
    work = self.work.get(node.name, 0.0) / node.piece[1]
    return slower * work / n**self.power + self.overhead * max(1.0, calls)

  def transfer(self, flow, value, source, target):
    n = min(len(source.devices), len(target.devices))
    return self.move * flow.values[value].shape[0] / 8 / n

  def switch(self, flow, value, placement):
    return self.change / len(placement.devices)

  def crowding(self, stage, devices, beside):
    del stage
    return self.crowded ** min(beside, 2) if devices else 1.0

  def memory(self, flow, chosen, place):
    n = len(chosen.places[place].devices)
    here = [s for s, where in chosen.stages.items() if where == place]
    stays = [self.held.get(s, 0.0) for s in here if s not in chosen.evict]
    most = max((self.held.get(s, 0.0) for s in here), default=0.0)
    rows = [chosen.rows.get(s, 8) for s in here]
    axes = dict(chosen.places[place].axes)
    spread = axes.get('tensor', 1) ** 0.5 * n**0.5
    return (sum(stays) + most * max(rows) / 8 / chosen.pieces**0.5) / spread


def line(work, **kwargs):
  """Rows go from stage to stage; the last adds them up and is carried."""
  names = list(work)
  calls = [
    (name, 'row', ('batch' if not i else names[i - 1],))
    for i, name in enumerate(names[:-1])
  ]
  calls.append((names[-1], 'sum', (names[-2],)))
  return build(calls, names[-1:]), Synthetic(work, **kwargs)


def ppo(*, lag=0, **kwargs):
  """Eight stages as PPO of language models has them, and their costs."""
  flow = build(
    [
      ('generate', 'row', ('batch', 'state.apply')),
      ('reward', 'row', ('generate',)),
      ('reference', 'row', ('generate',)),
      ('critic', 'row', ('generate', 'state.critic_gradient')),
      ('advantage', 'batch', ('reward', 'reference', 'critic')),
      ('gradient', 'sum', ('generate', 'advantage', 'state.apply')),
      ('critic_gradient', 'sum', ('generate', 'advantage')),
      ('apply', 'batch', ('gradient', 'state.apply')),
    ],
    ('critic_gradient', 'apply'),
  )
  work = {
    'generate': 12000.0,
    'reward': 900.0,
    'reference': 1500.0,
    'critic': 1400.0,
    'advantage': 1.0,
    'gradient': 7000.0,
    'critic_gradient': 5000.0,
    'apply': 40.0,
  }
  if lag:  # Generates with parameters that are a step older.
    old, new = len(flow.values), dict(flow.carry)
    (params,) = [v for v in new if flow.values[v].name == 'state.apply']
    first, *rest = flow.nodes
    reads = tuple(old if v == params else v for v in first.reads)
    flow = dataclasses.replace(
      flow,
      nodes=(dataclasses.replace(first, reads=reads), *rest),
      values=(*flow.values, value('state.old')),
      carry=(*flow.carry, (old, params)),
    )
  return flow, Synthetic(work, overhead=0.05, **kwargs)


def random_flow(rng, n):
  """A branching graph of `n` stages that may carry values."""
  names = 'abcdef'[:n]
  grains = [str(rng.choice(['row', 'row', 'sum', 'batch'])) for _ in names]
  carried = [
    s
    for s, grain in zip(names, grains, strict=True)
    if grain != 'row' and rng.random() < 0.6
  ]
  calls = []
  for i, (name, grain) in enumerate(zip(names, grains, strict=True)):
    rowed = [
      'batch',
      *(s for s, g in zip(names[:i], grains, strict=False) if g == 'row'),
    ]
    reads = set()
    if grain == 'batch':
      if i:
        reads |= set(rng.choice(list(names[:i]), int(rng.integers(1, 3))))
    else:
      reads |= set(rng.choice(rowed, int(rng.integers(1, 3))))
    whole = [f'state.{s}' for s in carried if rng.random() < 0.4]
    if not reads and not whole:
      reads = {'batch'}
    calls.append((name, grain, (*sorted(map(str, reads)), *whole)))
  return build(calls, carried)


def random_instance(seed):
  rng = np.random.default_rng(seed)
  devices = int(rng.choice([1, 2, 2, 3, 4, 4, 5, 6, 8]))
  n = int(rng.integers(2, 7 if devices < 3 else 5 if devices < 4 else 4))
  flow = random_flow(rng, n)
  names = list(flow.stages)
  some = lambda p: tuple(s for s in names if rng.random() < p)
  model = Synthetic(
    {s: float(rng.choice([0.0, 1.0, 3.0, 10.0, rng.random()])) for s in names},
    power=float(rng.choice([0.3, 0.9, 1.0])),
    overhead=float(rng.choice([0.0, 0.05, 0.5])),
    move=float(rng.choice([0.0, 0.1, 1.0])),
    change=float(rng.choice([0.0, 0.2])),
    held={s: float(rng.random()) for s in names},
    capacity=float(rng.choice([math.inf, math.inf, 2.0, 1.0, 0.3])),
    alone=some(0.15),
    meshes=int(rng.integers(1, 3)),
    crowded=1.5 if seed % 4 == 3 else 1.0,
  )
  pieces = [(1,), (1, 2), (4,), (1, 3)][rng.integers(4)]
  rows = {}
  rowed = [node.name for node in flow.nodes if node.rows]
  if rowed and rng.random() < 0.2:
    rows = {rowed[0]: (None, 2)}
  space = exact.Space(
    devices,
    unit=2 if devices in (6, 8) and rng.random() < 0.5 else 1,
    places=int(rng.integers(1, 4)),
    pieces=pieces,
    rows=rows,
    evict=some(0.2)[:2],
    together=(tuple(names[:2]),) if rng.random() < 0.2 else (),
  )
  lag = int(rng.choice([0, 0, 0, 1, 2]))
  if seed % 3 == 2:
    ahead = some(0.4)
    for node in flow.nodes:
      node.stage.ahead = node.name in ahead
  return flow, model, space, lag
