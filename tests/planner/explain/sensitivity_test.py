import pytest

from planner.costs import scaled
from planner.explain import sensitivity
from planner.search import exact, runners_up
from planner.search.plans import space as space_lib
from planner.simulation import evaluate_plan
from tests.planner.search import reference
import toys


def changes(flow, model, space, **kwargs):
  found = exact.search(flow, model, space, keep=25)
  result = sensitivity.sensitivity(flow, model, found, **kwargs)
  return found, {(c.cost, c.factor): c for c in result}


def test_a_near_tie_is_flipped_by_a_tenth_of_any_cost():
  # Apart, two equal stages take 5 s in pieces; on one place 5.1 s.
  flow, model = toys.line({'a': 4.0, 'b': 4.0}, power=0.65, move=0.0)
  found, by_cost = changes(flow, model, space_lib.Space(2, pieces=(1, 4)))
  assert len(found.best.places) == 2
  flipped = {key for key, change in by_cost.items() if change.plan}
  assert flipped == {('a', 0.9), ('b', 1.1), ('a', 1.1), ('b', 0.9)}


def test_what_is_assumed_is_changed_tenfold():
  # Apart, the stages take 5 s, and a place of both takes 6 s; it is worth
  # nothing to place `b` apart once it takes a tenth of a second.
  flow, model = toys.line({'a': 4.0, 'b': 4.0}, power=0.5, move=0.0)
  space = space_lib.Space(2, pieces=(1, 4))
  found, by_cost = changes(flow, model, space)
  assert not any(change.plan for change in by_cost.values())
  _, by_cost = changes(flow, model, space, assumed=['b'])
  assert {key for key in by_cost if key[0] == 'b'} == {('b', 10), ('b', 0.1)}
  assert {key for key in by_cost if key[0] == 'a'} == {('a', 1.1), ('a', 0.9)}
  flipped = {key for key, change in by_cost.items() if change.plan}
  assert flipped and flipped <= {('b', 10.0), ('b', 0.1)}
  assert all(by_cost[key].is_guess for key in flipped)
  assert not by_cost['a', 1.1].is_guess


@pytest.mark.parametrize('seed', range(12))
def test_sensitivity_agrees_with_brute_force(seed):
  flow, model, space, staleness = toys.random_instance(seed)
  found = exact.search(flow, model, space, staleness=staleness, keep=25)
  if found.best is None:
    return
  result = sensitivity.sensitivity(flow, model, found, staleness=staleness)
  for change in result[:: max(1, len(result) // 3)]:
    changed = sensitivity.changed(model, change.cost, change.factor)
    least = reference.brute_force(flow, changed, space, staleness)
    ours = evaluate_plan.evaluate(flow, changed, found.best, staleness).seconds
    assert change.proved
    assert change.before == pytest.approx(ours)
    matters = least < ours * (1 - sensitivity.MATTERS)
    assert (change.plan is not None) == matters
    if matters:
      assert change.seconds == pytest.approx(least, rel=1e-7)


def test_without_search_time_changes_are_not_proved():
  flow, model = toys.line({'a': 4.0, 'b': 4.0}, power=0.65)
  space = space_lib.Space(2, pieces=(1, 4))
  _, some = changes(flow, model, space, deadline=toys.deadline(60))
  assert not all(change.proved for change in some.values())
  found, few = changes(flow, model, space, deadline=toys.deadline(20))
  assert 0 < len(few) < len(sensitivity.all_changes(flow, found))
  _, none = changes(flow, model, space, deadline=toys.deadline(0))
  assert not none


def test_a_scaled_cost_model_can_be_searched():
  flow, model = toys.line({'a': 4.0, 'b': 2.0}, move=1.0)
  scaled_model = scaled.ScaledCosts(model, {'a': 1.5}, transfers=2.0)
  first, second = (
    exact.search(flow, m, space_lib.Space(1)).seconds
    for m in (model, scaled_model)
  )
  assert (first, second) == (6.0, 8.0)
  assert scaled_model.capacity == model.capacity


def test_runners_up_include_plans_that_the_search_excluded():
  flow, model = toys.line({'a': 4.0, 'b': 4.0, 'c': 1.0}, power=1.0)
  found = exact.search(flow, model, space_lib.Space(4, pieces=(1, 2)))
  ranked = runners_up.runners_up(flow, model, found)
  assert {len(plan.places) for plan, _ in ranked} == {1, 2, 3}
  assert [s for _, s in ranked] == sorted(s for _, s in ranked)
  assert ranked[0] == (found.best, found.seconds)


def test_a_runner_up_may_be_faster_than_the_best_of_a_stopped_search():
  flow, model = toys.ppo(power=0.6)
  space = space_lib.Space(64, unit=8, pieces=(1, 2, 4))
  short = exact.search(flow, model, space, deadline=toys.deadline(400))
  full = exact.search(flow, model, space)
  found = runners_up.best_of(short, full.ranked)
  assert found.best == full.best
  assert found.bound == pytest.approx(found.seconds * (1 - found.gap))
  assert runners_up.best_of(full, full.ranked) is full


def test_a_search_below_a_limit_finds_a_faster_plan_or_proves_there_is_none():
  flow, model = toys.ppo(power=0.6)
  space = space_lib.Space(64, unit=8, pieces=(1, 2, 4))
  best = exact.search(flow, model, space)
  same = exact.search(flow, model, space, below=best.seconds * 1.01)
  none = exact.search(flow, model, space, below=best.seconds)
  assert (same.best, same.seconds) == (best.best, best.seconds)
  assert none.best is None and none.gap == 0
  assert none.tried <= best.tried
