import functools
import math
import pathlib
import subprocess
import sys
import time

import pytest

import claims
from planner.search import algorithm1, exact
from planner.search import deadline as deadline_lib
from planner.search.plans import grouping
from planner.search.plans import space as space_lib
from tests.planner.search import reference
import toys

ROOT = pathlib.Path(__file__).parents[3]


@functools.cache
def optimum(seed) -> float:
  """Seconds of the fastest plan of a random instance, by trying everything."""
  return reference.brute_force(*toys.random_instance(seed))


def agrees(seed) -> bool:
  """Whether there is a plan; the search and trying everything agree."""
  flow, model, space, staleness = toys.random_instance(seed)
  found = exact.search(flow, model, space, staleness=staleness)
  other = algorithm1.algorithm1(flow, model, space, staleness=staleness)
  best = optimum(seed)
  assert found.gap == 0, seed
  assert found.bound == found.seconds
  assert found.seconds == pytest.approx(best, rel=1e-7), seed
  assert other.seconds >= best * (1 - 1e-7), seed
  for chosen, words in found.infeasible:
    assert reference.need(flow, model, chosen) > model.capacity
    assert '>' in words
  for some in (found, other):
    for chosen, seconds in some.ranked:
      assert reference.period(flow, model, chosen, staleness) == pytest.approx(
        seconds
      )
      assert reference.need(flow, model, chosen) <= model.capacity
  assert (found.best is None) == (best == math.inf)
  return found.best is not None


# The first ones are the largest. Among fifty, some have no plan at all.
INSTANCES = [(0, 25), *((i, i + 50) for i in range(25, 525, 50))]


@pytest.mark.slow
@pytest.mark.parametrize('first, end', claims.some(INSTANCES, [(25, 75)]))
def test_search_finds_the_brute_force_optimum(first, end):
  there = [agrees(seed) for seed in range(first, end)]
  assert 0 < sum(there) < end - first


@pytest.mark.slow
def test_a_search_that_adopts_algorithm_1_at_once_proves_the_same(monkeypatch):
  monkeypatch.setattr(exact, 'LATE', 0.0)
  adopted = 0
  for seed in range(25, 75):
    flow, model, space, staleness = toys.random_instance(seed)
    finder = exact.Search(
      flow, model, space, staleness, 5, deadline=toys.deadline(10**9)
    )
    found = finder.run()
    best = optimum(seed)
    assert found.gap == 0, seed
    assert found.seconds == pytest.approx(best, rel=1e-7), seed
    adopted += not finder.may_adopt
  assert adopted > 10


def test_two_equal_stages_share_two_devices_in_pieces():
  # A device each: half the devices for twice as long, but both at once.
  flow, model = toys.line({'a': 4.0, 'b': 4.0}, power=0.0)
  found = exact.search(flow, model, space_lib.Space(2, pieces=(1, 2, 4)))
  assert found.seconds == pytest.approx(1 + 4 * 1)  # A piece, and all of b.
  assert found.best.pieces == 4
  assert len(found.best.places) == 2
  assert found.gap == 0


def test_stages_that_scale_share_all_devices():
  flow, model = toys.line({'a': 4.0, 'b': 4.0}, power=1.0)
  found = exact.search(flow, model, space_lib.Space(4, pieces=(1, 2, 4)))
  assert list(found.best.places) == ['all']
  assert found.seconds == pytest.approx(2.0)


def test_devices_may_be_left_idle():
  class Slower(toys.Synthetic):
    """More devices than two talk more than they work."""

    def seconds(self, flow, node, placement, *execution):
      n = len(placement.devices)
      return super().seconds(flow, node, placement, *execution) + max(0, n - 2)

  flow, _ = toys.line({'a': 1.0, 'b': 1.0})
  found = exact.search(flow, Slower({'a': 1.0, 'b': 1.0}), space_lib.Space(8))
  assert sum(len(p.devices) for p in found.best.places.values()) <= 4


def test_a_stage_that_runs_on_one_device_gets_one():
  flow, model = toys.line({'a': 8.0, 'judge': 1.0}, alone=('judge',))
  found = exact.search(flow, model, space_lib.Space(4, pieces=(1, 2, 4)))
  places = found.best.places
  assert len(places[found.best.stages['judge']].devices) == 1
  assert len(places[found.best.stages['a']].devices) == 3


def test_a_search_without_a_plan_that_fits_explains_the_nearest():
  flow, model = toys.line({'a': 1.0, 'b': 1.0}, held={'a': 96.0}, capacity=8.0)
  found = exact.search(flow, model, space_lib.Space(4))
  assert (found.best, found.seconds, found.gap) == (None, math.inf, 0)
  (near, words), *_ = found.infeasible
  assert words == (
    'all needs 96 B on each of its 4 devices > 8 B that may be used: '
    '1100.0% too much'
  )
  assert reference.need(flow, model, near) == 96.0


def test_memory_limits_placement_and_offloading_makes_room():
  flow, model = toys.line(
    {'a': 1.0, 'b': 1.0}, held={'a': 2.0, 'b': 2.0}, capacity=4.1, change=0.5
  )
  apart = exact.search(flow, model, space_lib.Space(2))
  assert len(apart.best.places) == 2
  room = exact.search(flow, model, space_lib.Space(1, offload=('b',)))
  assert room.best.offload == ('b',)
  assert exact.search(flow, model, space_lib.Space(1)).best is None


def test_a_plan_that_lacks_little_memory_computes_activations_again():
  work = {'a': 1.0, 'b': 1.0}
  rest = space_lib.Space(1, remat={'b': ('none', 'some', 'full')})
  for capacity, remat, seconds in (
    (5.0, {}, 2.0),
    (3.998, {'b': 'some'}, 2.2),  # 0.05 % less than `b` needs.
    (2.5, {'b': 'full'}, 2.4),
  ):
    flow, model = toys.line(work, held={'b': 2.0}, capacity=capacity)
    found = exact.search(flow, model, rest)
    assert (found.best.remat, found.gap) == (remat, 0)
    assert found.seconds == pytest.approx(seconds)
  flow, model = toys.line(work, held={'b': 2.0}, capacity=2.3)
  found = exact.search(flow, model, rest)
  assert found.best is None and found.proved
  assert found.infeasible[0][0].remat == {'b': 'full'}


def test_staleness_lets_steps_overlap():
  flow, model = toys.ppo(staleness=1)
  space = space_lib.Space(64, unit=8, pieces=(1, 2))
  one, two = (
    exact.search(flow, model, space, staleness=staleness)
    for staleness in (0, 1)
  )
  assert two.seconds < one.seconds
  assert one.gap == two.gap == 0


def test_a_stopped_search_reports_its_gap():
  flow, model = toys.ppo(power=0.6)
  space = space_lib.Space(64, unit=8, pieces=(1, 2, 4))
  short = exact.search(flow, model, space, deadline=toys.deadline(400))
  full = exact.search(flow, model, space)
  assert 0 < short.gap < 1
  assert short.bound <= full.seconds <= short.seconds
  assert short.bound == pytest.approx(short.seconds * (1 - short.gap))
  assert full.gap == 0


def test_a_search_without_time_has_a_plan_of_one_place():
  flow, model = toys.ppo(power=0.6, meshes=2)
  space = space_lib.Space(16, unit=8, pieces=(1, 2))
  found = exact.search(flow, model, space, deadline=toys.deadline(0))
  ((name, place),) = found.best.places.items()
  assert name == 'all' and len(place.devices) == 16
  # Nothing is proved of it, but that no time is negative.
  assert found.simulated == 1 and found.bound == 0 and found.gap == 1
  assert found.ranked == [(found.best, found.seconds)]
  assert exact.search(flow, model, space).seconds <= found.seconds


def test_a_search_without_time_has_no_plan_if_it_does_not_fit():
  flow, model = toys.line({'a': 1.0, 'b': 1.0}, held={'a': 96.0}, capacity=8.0)
  found = exact.search(
    flow, model, space_lib.Space(4), deadline=toys.deadline(0)
  )
  assert found.best is None and not found.proved
  assert '96 B on each of its 4 devices' in found.infeasible[0][1]


def test_a_stopped_search_adopts_a_faster_plan_of_algorithm_1():
  flow, model = toys.ppo(staleness=1, power=0.3, meshes=2)
  space = space_lib.Space(64, unit=8, max_places=2, pieces=(1, 2, 4))
  other = algorithm1.algorithm1(flow, model, space, staleness=1)
  early, late = (
    exact.search(
      flow, model, space, staleness=1, keep=50, deadline=toys.deadline(checks)
    )
    for checks in (1000, 10_000)  # Without Algorithm 1 a proof takes 12,000.
  )
  # Algorithm 1 takes 1,000 and more, of which a short search has a quarter.
  assert early.seconds > 1.5 * other.seconds and early.gap > 0.3
  assert late.seconds <= other.seconds
  for found in (early, late):
    plans = [plan.to_json() for plan, _ in found.ranked]
    assert len({*plans}) == len(plans) == found.simulated


def test_the_plan_of_algorithm_1_also_shortens_a_proof():
  flow, model = toys.ppo(staleness=1, power=0.3, meshes=2)
  space = space_lib.Space(64, unit=8, max_places=2, pieces=(1, 2, 4))
  limited = exact.search(
    flow, model, space, staleness=1, deadline=toys.deadline(10_000)
  )
  full = exact.search(flow, model, space, staleness=1)
  assert limited.proved and full.proved
  assert limited.seconds == pytest.approx(full.seconds)
  assert limited.tried < full.tried


class Clock:
  """A clock that goes on by a second with each query of a cost model."""

  def __init__(self, model):
    self.model, self.now = model, 0.0

  def __call__(self):
    return self.now

  def __getattr__(self, name):
    found = getattr(self.model, name)
    if not callable(found):
      return found

    def query(*args):
      self.now += 1.0
      return found(*args)

    return query


@pytest.mark.parametrize('search', [exact.search, algorithm1.algorithm1])
def test_no_phase_exceeds_the_time_limit(search):
  """Tables, sizes that fit, leaves and simulations stop at the deadline."""
  flow, model = toys.ppo(power=0.6, meshes=2, capacity=1e3)
  space = space_lib.Space(
    32, unit=4, pieces=(1, 2), micro_batch={'gradient': (None, 4, 2)}
  )
  most = 300  # Costs of all stages on places of one size, or of a simulation.
  clock = Clock(model)
  search(flow, clock, space)
  queries = int(clock.now)
  assert queries > 5 * most
  for limit in range(0, queries - most, queries // 3):
    clock = Clock(model)
    deadline = deadline_lib.Deadline(limit, clock)
    try:
      found = search(flow, clock, space, deadline=deadline)
      assert found.gap > 0 and found.bound <= found.seconds
    except deadline_lib.TimeUp:
      assert search is algorithm1.algorithm1
    assert limit <= clock.now < limit + most


def test_time_may_be_up_before_all_partitions_are_listed(monkeypatch):
  """Fourteen stages have eleven million partitions into four places or less."""
  names = 'abcdefghijklmn'
  flow = toys.build([(name, 'row', ('batch',)) for name in names], ())
  model = toys.Synthetic(dict.fromkeys(names, 1.0))
  listed, real = [], grouping.partitions

  def partitions(*args):
    for blocks in real(*args):
      listed.append(blocks)
      assert len(listed) < 10_000
      yield blocks

  monkeypatch.setattr(grouping, 'partitions', partitions)
  space = space_lib.Space(2, pieces=(1, 2))
  found = exact.search(flow, model, space, deadline=toys.deadline(0))
  assert list(found.best.places) == ['all']
  assert found.gap == 1 and not found.proved
  with pytest.raises(deadline_lib.TimeUp):
    algorithm1.algorithm1(flow, model, space, deadline=toys.deadline(0))


def test_a_bound_holds_wherever_a_search_is_stopped():
  flow, model = toys.ppo(power=0.6)
  space = space_lib.Space(24, unit=8, pieces=(1, 2))
  best = exact.search(flow, model, space).seconds
  stopped = 0
  for checks in range(0, 1200, 110):
    found = exact.search(flow, model, space, deadline=toys.deadline(checks))
    assert found.bound <= best <= found.seconds
    assert found.gap == 1 or found.best
    stopped += found.gap > 0
  assert stopped > 3


@pytest.mark.slow
@pytest.mark.parametrize(
  'devices, lag',
  claims.some(
    [(1024, 0), (1024, 1), (4096, 0), (4096, 1)], [(1024, 1), (4096, 0)]
  ),
)
def test_eight_stages_are_planned_on_clusters(devices, lag):
  flow, model = toys.ppo(staleness=lag, move=0.5, meshes=2)
  space = space_lib.Space(devices, unit=8, pieces=(1, 2, 4, 8))
  start = time.process_time()
  found = exact.search(flow, model, space, staleness=lag)
  # Ten seconds on two cores; other machines are several times slower.
  assert time.process_time() - start < 60
  assert found.tried < {1024: 60_000, 4096: 80_000}[devices]
  assert found.simulated < 500
  assert found.gap == 0
  assert reference.period(flow, model, found.best, lag) == pytest.approx(
    found.seconds
  )


def test_a_search_needs_no_jax():
  code = (
    'import sys\n'
    'from planner.search import algorithm1, exact\n'
    'from planner.search.plans import space as space_lib\n'
    'import toys\n'
    'flow, model = toys.line({"a": 4.0, "b": 4.0})\n'
    'found = exact.search(flow, model, space_lib.Space(2))\n'
    'other = algorithm1.algorithm1(flow, model, space_lib.Space(2))\n'
    'assert found.best and other.best\n'
    'assert "jax" not in sys.modules, "jax"'
  )
  done = subprocess.run(
    [sys.executable, '-c', code],
    cwd=ROOT,
    env={'PYTHONPATH': f'{ROOT}:{ROOT / "tests/fixtures"}'},
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
