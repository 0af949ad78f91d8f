import pytest

from planner.costs import scaled
from planner.explain import sensitivity
from planner.search import exact, runners_up
from planner.search import space as space_lib
from planner.simulation import evaluate_plan
from tests.planner.search import search_test
import toys


def changes(flow, model, space, **kwargs):
  found = exact.search(flow, model, space, keep=25)
  made = sensitivity.sensitivity(flow, model, found, **kwargs)
  return found, {(c.cost, c.times): c for c in made}


def test_a_choice_that_is_nearly_a_tie_hangs_on_its_costs():
  # Apart, two equal stages take 5 s in pieces; on one place 5.1 s.
  flow, model = toys.line({'a': 4.0, 'b': 4.0}, power=0.65, move=0.0)
  found, made = changes(flow, model, space_lib.Space(2, pieces=(1, 4)))
  assert len(found.best.places) == 2
  flipped = {key for key, change in made.items() if change.plan}
  assert flipped == {('a', 0.9), ('b', 1.1), ('a', 1.1), ('b', 0.9)}


@pytest.mark.parametrize('seed', range(12))
def test_what_it_says_is_what_trying_everything_finds(seed):
  flow, model, space, staleness = toys.random_instance(seed)
  found = exact.search(flow, model, space, staleness=staleness, keep=25)
  if found.best is None:
    return
  made = sensitivity.sensitivity(flow, model, found, staleness=staleness)
  for change in made[:: max(1, len(made) // 3)]:
    changed = sensitivity.changed(model, change.cost, change.times)
    least = search_test.brute_force(flow, changed, space, staleness)
    ours = evaluate_plan.evaluate(flow, changed, found.best, staleness).seconds
    assert change.proved
    assert change.before == pytest.approx(ours)
    matters = least < ours * (1 - sensitivity.MATTERS)
    assert (change.plan is not None) == matters
    if matters:
      assert change.seconds == pytest.approx(least, rel=1e-7)


def test_without_time_it_compares_what_was_timed_and_says_so():
  flow, model = toys.line({'a': 4.0, 'b': 4.0}, power=0.65)
  found, made = changes(
    flow, model, space_lib.Space(2, pieces=(1, 4)), seconds=0.0
  )
  assert not made['a', 0.9].proved


def test_a_model_with_one_number_changed_is_a_model():
  flow, model = toys.line({'a': 4.0, 'b': 2.0}, move=1.0)
  made = scaled.ScaledCosts(model, {'a': 1.5}, transfers=2.0)
  first, second = (
    exact.search(flow, m, space_lib.Space(1)).seconds for m in (model, made)
  )
  assert (first, second) == (6.0, 8.0)
  assert made.capacity == model.capacity


def test_what_a_search_ruled_out_is_there_to_compare():
  flow, model = toys.line({'a': 4.0, 'b': 4.0, 'c': 1.0}, power=1.0)
  found = exact.search(flow, model, space_lib.Space(4, pieces=(1, 2)))
  ranked = runners_up.runners_up(flow, model, found)
  assert {len(plan.places) for plan, _ in ranked} == {1, 2, 3}
  assert [s for _, s in ranked] == sorted(s for _, s in ranked)
  assert ranked[0] == (found.best, found.seconds)


def test_a_runner_up_may_be_better_than_what_a_stopped_search_has_found():
  flow, model = toys.ppo(power=0.6)
  space = space_lib.Space(64, unit=8, pieces=(1, 2, 4))
  short = exact.search(flow, model, space, seconds=0.0)
  full = exact.search(flow, model, space)
  found = runners_up.best_of(short, full.ranked)
  assert found.best == full.best
  assert found.bound == pytest.approx(found.seconds * (1 - found.gap))
  assert runners_up.best_of(full, full.ranked) is full


def test_a_search_below_a_number_finds_what_is_faster_or_proves_none_is():
  flow, model = toys.ppo(power=0.6)
  space = space_lib.Space(64, unit=8, pieces=(1, 2, 4))
  best = exact.search(flow, model, space)
  same = exact.search(flow, model, space, below=best.seconds * 1.01)
  none = exact.search(flow, model, space, below=best.seconds)
  assert (same.best, same.seconds) == (best.best, best.seconds)
  assert none.best is None and none.gap == 0
  assert none.tried <= best.tried
