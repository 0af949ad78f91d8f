import dataclasses
import itertools
import json
import math
import pathlib
import subprocess
import sys
import time

import numpy as np
import pytest

from planner import graph, passes, plan
from planner import simulate as simulate_lib
from planner.search import algorithm1, exact

ROOT = pathlib.Path(__file__).parents[1]


class Stage:
  """What a planner sees of a stage."""

  whole, group, host = (), 1, False

  def __init__(self, name, grain):
    self.name, self.grain = name, grain

  def merge(self, a, b):
    return a + b


class Synthetic:
  """Seconds ~ work / devices ** power + overhead; memory of shares.

  Attributes:
    work: seconds of each stage on one device.
    held: bytes that each stage holds on one device.
    alone: stages that run on one device only.
    meshes: how many ways to lay devices out; each costs a little more.
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
  ):
    self.work, self.power, self.overhead = work, power, overhead
    self.move, self.change, self.capacity = move, change, capacity
    self.held, self.alone, self.meshes = held or {}, alone, meshes

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

  def memory(self, flow, chosen, place):
    n = len(chosen.places[place].devices)
    here = [s for s, where in chosen.stages.items() if where == place]
    stays = [self.held.get(s, 0.0) for s in here if s not in chosen.evict]
    most = max((self.held.get(s, 0.0) for s in here), default=0.0)
    rows = [chosen.rows.get(s, 8) for s in here]
    axes = dict(chosen.places[place].axes)
    spread = axes.get('tensor', 1) ** 0.5 * n**0.5
    return (sum(stays) + most * max(rows) / 8 / chosen.pieces**0.5) / spread


def value(name='x', rows=8):
  return graph.Value(name, (rows,), np.dtype('float32'), ('B',))


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
  return flow, model, space, int(rng.choice([0, 0, 0, 1, 2]))


class Priced:
  """The costs of a model under a plan, without any cache."""

  def __init__(self, model, chosen):
    self.model, self.chosen = model, chosen

  def seconds(self, flow, node, place):
    return self.model.seconds(
      flow, node, self.chosen.places[place], self.chosen.rows.get(node.name)
    )

  def transfer(self, flow, value, source, target):
    if source == target:
      return 0.0
    places = self.chosen.places
    return self.model.transfer(flow, value, places[source], places[target])

  def switch(self, flow, value, place):
    return self.model.switch(flow, value, self.chosen.places[place])


def play(flow, model, chosen, ahead, **kwargs):
  cost = Priced(model, chosen)
  cut, programs = passes.lower(flow, chosen, cost)
  return simulate_lib.simulate(cut, programs, cost, ahead=ahead, **kwargs)


def period(flow, model, chosen, ahead):
  """What is sought the least of: no place falls behind for ever."""
  made = play(flow, model, chosen, ahead)
  busy = [
    sum(s.end - s.start for s in made.spans if (s.place, s.step) == (place, 0)
        and s.what != 'wait')
    for place in chosen.places
  ]  # fmt: skip
  return max(made.period, *busy)


def set_partitions(things):
  if not things:
    yield []
    return
  for rest in set_partitions(things[1:]):
    yield [[things[0]], *rest]
    for i, block in enumerate(rest):
      yield [*rest[:i], [things[0], *block], *rest[i + 1 :]]


def every_plan(flow, model, space):
  """All of a space, in the plainest way; some cannot be followed."""
  subsets = [
    some
    for r in range(len(space.evict) + 1)
    for some in itertools.combinations(space.evict, r)
  ]
  options = [
    [(stage, rows) for rows in allowed] for stage, allowed in space.rows
  ]
  for blocks in set_partitions(list(flow.stages)):
    if len(blocks) > space.places:
      continue
    blocks = sorted(blocks, key=lambda b: min(map(flow.stages.index, b)))
    if not all(
      any(set(some) <= set(block) for block in blocks)
      for some in space.together
    ):
      continue
    units = space.devices // space.unit
    for sizes in itertools.product(range(1, units + 1), repeat=len(blocks)):
      if sum(sizes) > units:
        continue
      sizes = [n * space.unit for n in sizes]
      ordered = [
        tuple(s for s in flow.stages if s in block) for block in blocks
      ]
      menus = [model.axes(b, n) for b, n in zip(ordered, sizes, strict=True)]
      for axes in itertools.product(*menus):
        places, at = {}, 0
        for b in sorted(range(len(sizes)), key=lambda b: -sizes[b]):
          devices = tuple(range(at, at + sizes[b]))
          places[b] = plan.Placement(devices, axes[b])
          at += sizes[b]
        for pieces, evict, rows in itertools.product(
          space.pieces, subsets, itertools.product(*options)
        ):
          yield plan.Plan(
            {str(b): places[b] for b in range(len(blocks))},
            {s: str(b) for b, block in enumerate(ordered) for s in block},
            rows={s: n for s, n in rows if n is not None},
            pieces=pieces,
            evict=evict,
          )


def brute_force(flow, model, space, ahead):
  """The least seconds of all plans that fit; infinite if none does."""
  best = math.inf
  for chosen in every_plan(flow, model, space):
    need = max(model.memory(flow, chosen, place) for place in chosen.places)
    if need > model.capacity:
      continue
    try:
      best = min(best, period(flow, model, chosen, ahead))
    except ValueError:  # Of rows or pieces that there are not.
      continue
  return best


def agrees(seed) -> bool:
  """Whether there is a plan; the search and trying everything agree."""
  flow, model, space, ahead = random_instance(seed)
  found = exact.search(flow, model, space, ahead=ahead)
  other = algorithm1.algorithm1(flow, model, space, ahead=ahead)
  best = brute_force(flow, model, space, ahead)
  assert found.gap == 0, seed
  assert found.bound == found.seconds
  assert found.seconds == pytest.approx(best, rel=1e-7), seed
  assert other.seconds >= best * (1 - 1e-7), seed
  for chosen, words in found.infeasible:
    needs = [model.memory(flow, chosen, place) for place in chosen.places]
    assert max(needs) > model.capacity
    assert '>' in words
  for some in (found, other):
    for chosen, seconds in some.ranked:
      assert period(flow, model, chosen, ahead) == pytest.approx(seconds)
      need = max(model.memory(flow, chosen, place) for place in chosen.places)
      assert need <= model.capacity
  assert (found.best is None) == (best == math.inf)
  return found.best is not None


def test_what_is_found_is_what_trying_everything_finds():
  there = [agrees(seed) for seed in range(25)]
  assert 5 < sum(there) < 25  # Some have no plan at all.


@pytest.mark.slow
@pytest.mark.parametrize('start', range(25, 525, 50))
def test_what_is_found_is_what_trying_everything_finds_at_length(start):
  there = [agrees(seed) for seed in range(start, start + 50)]
  assert 0 < sum(there) < 50


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


def test_two_equal_stages_share_two_devices_in_pieces():
  # A device each: half the devices for twice as long, but both at once.
  flow, model = line({'a': 4.0, 'b': 4.0}, power=0.0)
  found = exact.search(flow, model, exact.Space(2, pieces=(1, 2, 4)))
  assert found.seconds == pytest.approx(1 + 4 * 1)  # A piece, and all of b.
  assert found.best.pieces == 4
  assert len(found.best.places) == 2
  assert found.gap == 0


def test_stages_that_scale_share_all_devices():
  flow, model = line({'a': 4.0, 'b': 4.0}, power=1.0)
  found = exact.search(flow, model, exact.Space(4, pieces=(1, 2, 4)))
  assert list(found.best.places) == ['all']
  assert found.seconds == pytest.approx(2.0)


def test_devices_may_be_left_idle():
  class Slower(Synthetic):
    """More devices than two talk more than they work."""

    def seconds(self, flow, node, placement, rows):
      n = len(placement.devices)
      return super().seconds(flow, node, placement, rows) + max(0, n - 2)

  flow, _ = line({'a': 1.0, 'b': 1.0})
  found = exact.search(flow, Slower({'a': 1.0, 'b': 1.0}), exact.Space(8))
  assert sum(len(p.devices) for p in found.best.places.values()) <= 4


def test_a_stage_for_one_device_gets_one():
  flow, model = line({'a': 8.0, 'judge': 1.0}, alone=('judge',))
  found = exact.search(flow, model, exact.Space(4, pieces=(1, 2, 4)))
  places = found.best.places
  assert len(places[found.best.stages['judge']].devices) == 1
  assert len(places[found.best.stages['a']].devices) == 3


def test_what_fits_nowhere_is_explained():
  flow, model = line({'a': 1.0, 'b': 1.0}, held={'a': 96.0}, capacity=8.0)
  found = exact.search(flow, model, exact.Space(4))
  assert (found.best, found.seconds, found.gap) == (None, math.inf, 0)
  (near, words), *_ = found.infeasible
  assert words == (
    'all needs 96 B on each of its 4 devices > 8 B that may be used: '
    '1100.0% too much'
  )
  assert model.memory(flow, near, 'all') == 96.0


def test_memory_decides_where_and_evictions_make_room():
  flow, model = line(
    {'a': 1.0, 'b': 1.0}, held={'a': 2.0, 'b': 2.0}, capacity=4.1, change=0.5
  )
  apart = exact.search(flow, model, exact.Space(2))
  assert len(apart.best.places) == 2
  room = exact.search(flow, model, exact.Space(1, evict=('b',)))
  assert room.best.evict == ('b',)
  assert exact.search(flow, model, exact.Space(1)).best is None


def test_an_older_state_lets_steps_overlap():
  flow, model = ppo(lag=1)
  space = exact.Space(64, unit=8, pieces=(1, 2))
  one, two = (exact.search(flow, model, space, ahead=ahead) for ahead in (0, 1))
  assert two.seconds < one.seconds
  assert one.gap == two.gap == 0


def test_a_search_that_is_stopped_says_how_far_it_came():
  flow, model = ppo(power=0.6)
  space = exact.Space(64, unit=8, pieces=(1, 2, 4))
  short = exact.search(flow, model, space, seconds=0.0)
  full = exact.search(flow, model, space)
  assert 0 < short.gap < 1
  assert short.bound <= full.seconds <= short.seconds
  assert short.bound == pytest.approx(short.seconds * (1 - short.gap))
  assert full.gap == 0


@pytest.mark.slow
@pytest.mark.parametrize('lag', [0, 1])
@pytest.mark.parametrize('devices, limit', [(1024, 10), (4096, 60)])
def test_eight_stages_are_planned_on_clusters(devices, limit, lag):
  flow, model = ppo(lag=lag, move=0.5, meshes=2)
  space = exact.Space(devices, unit=8, pieces=(1, 2, 4, 8))
  start = time.process_time()
  found = exact.search(flow, model, space, ahead=lag)
  assert time.process_time() - start < limit
  assert found.gap == 0
  assert period(flow, model, found.best, lag) == pytest.approx(found.seconds)


def test_algorithm_1_pipelines_as_its_formula_says():
  flow, model = line({'a': 4.0, 'b': 4.0}, power=0.0)
  found = algorithm1.algorithm1(flow, model, exact.Space(2, pieces=(1, 4)))
  assert found.best.pieces == 4
  assert found.seconds == pytest.approx(2 + 3 * 1)
  assert (found.bound, found.gap) == (None, None)


def test_algorithm_1_takes_cycles_for_one_stage():
  # An update between two gradients: one cannot be cut from the other.
  flow = build(
    [
      ('generate', 'row', ('batch', 'state.apply')),
      ('gradient', 'sum', ('generate', 'state.apply')),
      ('apply', 'batch', ('gradient', 'state.apply')),
    ],
    ('apply',),
  )
  again = [
    graph.Node(flow.nodes[1].stage, (2, 4), (5,), frozenset({2})),
    graph.Node(flow.nodes[2].stage, (5, 4), (6,)),
  ]
  flow = dataclasses.replace(
    flow,
    nodes=(*flow.nodes, *again),
    values=(*flow.values, value(), value()),
    carry=((1, 6),),
    outputs=(6,),
  )
  model = Synthetic({'generate': 4.0, 'gradient': 2.0, 'apply': 0.0}, power=0.0)
  found = algorithm1.algorithm1(flow, model, exact.Space(3, pieces=(1, 2)))
  stages = found.best.stages
  assert stages['gradient'] == stages['apply'] != stages['generate']


def test_algorithm_1_is_never_better():
  flow, model = ppo(power=0.6, move=0.5, meshes=2)
  space = exact.Space(64, unit=8, pieces=(1, 2, 4))
  found = exact.search(flow, model, space)
  other = algorithm1.algorithm1(flow, model, space)
  assert found.seconds <= other.seconds
  assert found.bound <= other.seconds


def test_a_space_is_told_in_json():
  space = exact.Space(8, rows={'a': (None, 4)}, evict=('a',))
  told = json.loads(space.to_json())
  assert told['devices'] == 8
  assert told['rows'] == [['a', [None, 4]]]


@pytest.mark.parametrize(
  'kwargs, why',
  [
    ({'devices': 4, 'unit': 8}, 'no place of 8'),
    ({'devices': 4, 'places': 0}, 'at most 0 places'),
    ({'devices': 4, 'pieces': ()}, 'no plan'),
  ],
)
def test_a_space_without_plans_is_refused(kwargs, why):
  with pytest.raises(ValueError, match=why):
    exact.Space(**kwargs)


def test_stages_that_there_are_not_are_refused():
  flow, model = line({'a': 1.0, 'b': 1.0})
  for strange in ({'together': (('a', 'z'),)}, {'evict': ('z',)}):
    with pytest.raises(ValueError, match=r"\['z'\].*'a', 'b'"):
      exact.search(flow, model, exact.Space(2, **strange))


def test_a_search_needs_no_jax():
  code = (
    'import sys\n'
    'from planner.search import algorithm1, exact\n'
    'import search_test as t\n'
    'flow, model = t.line({"a": 4.0, "b": 4.0})\n'
    'found = exact.search(flow, model, exact.Space(2))\n'
    'other = algorithm1.algorithm1(flow, model, exact.Space(2))\n'
    'assert found.best and other.best\n'
    'assert "jax" not in sys.modules, "jax"'
  )
  done = subprocess.run(
    [sys.executable, '-c', code],
    cwd=ROOT,
    env={'PYTHONPATH': f'{ROOT}:{ROOT / "tests"}'},
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
