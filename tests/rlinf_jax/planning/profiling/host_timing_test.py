"""Host stages are timed where a plan is made."""

import dataclasses

import pytest

from rlinf_jax.isolation import pool
from rlinf_jax.planning.profiling import host_timing
from tests.rlinf_jax.planning import plan_report_test
import tiny


def traced(fn):
  """A recorded step of GRPO with a function on the host as its reward."""
  workflow = plan_report_test.grpo(
    dataclasses.replace(tiny.even_on_host, fn=fn)
  )
  return tiny.trace(workflow, tiny.problem())


@pytest.fixture
def clock(monkeypatch):
  """A clock in place of the machine's, which goes on by `clock.sleep` alone."""

  class Clock:
    now = 0.0

    def perf_counter(self):
      return self.now

    monotonic = perf_counter

    def sleep(self, seconds):
      self.now += seconds

  monkeypatch.setattr(host_timing, 'time', Clock())
  return host_timing.time


def test_a_slow_reward_takes_as_long_as_it_takes(clock):
  calls = []

  def slow(answer, action, mask):
    calls.append(len(action))
    clock.sleep(0.002 * len(action))

  (found,) = host_timing.seconds_per_row(traced(slow), 0.2).values()
  assert found == pytest.approx(0.002)
  assert calls[1] < calls[-1] and sum(calls[1:]) * 0.002 < 0.2


def test_a_call_that_another_process_delays_does_not_count(monkeypatch, clock):
  monkeypatch.setattr(pool, 'default_processes', lambda: 1)
  calls = []

  def delayed_once(answer, action, mask):
    calls.append(len(action))
    clock.sleep(0.001 * len(action))
    if calls.count(rows) == 1 and calls[-1] == rows:
      clock.sleep(0.6)

  flow = traced(delayed_once)
  (node,) = [node for node in flow.nodes if node.name == 'reward']
  all_rows = flow.rows_of(node)
  for rows in all_rows, all_rows // 2:  # noqa: B007  `delayed_once` reads it.
    calls.clear()
    (found,) = host_timing.seconds_per_row(flow).values()
    assert calls[-1] == all_rows
    assert found == pytest.approx(0.001)


def test_the_start_of_processes_does_not_count(monkeypatch, clock):
  """Each process of a pool starts with the first row that it gets."""
  to_start = [0.1] * 4
  monkeypatch.setattr(pool, 'default_processes', lambda: len(to_start))

  def reward(answer, action, mask):
    for _ in action:
      clock.sleep(to_start.pop() if to_start else 0.001)

  (found,) = host_timing.seconds_per_row(traced(reward), 0.1).values()
  assert not to_start
  assert found == pytest.approx(0.001)


def test_a_reward_that_fails_on_a_late_row_alone_is_timed_on_other_tokens():
  def picky(answer, action, mask):
    if len(action) == 16 and action.max() > 9:
      raise IndexError(action)

  assert 'reward' in host_timing.seconds_per_row(traced(picky), 1.0)


def test_tokens_are_of_a_small_vocabulary_if_need_be():
  def picky(answer, action, mask):
    if action.max() > 9:
      raise IndexError(action)

  assert 'reward' in host_timing.seconds_per_row(traced(picky), 0.01)


def test_what_cannot_be_called_is_left_out():
  def broken(answer, action, mask):
    raise RuntimeError('no server')

  found = host_timing.seconds_per_row(traced(broken), 0.01)
  assert found == {} and host_timing.describe(found, {}) is None


def test_stages_in_jax_are_not_timed():
  flow = plan_report_test.flow()
  assert {*host_timing.seconds_per_row(flow, 0.01)} == {'reward'}


def test_seconds_that_are_given_are_read_and_refused():
  assert host_timing.parse(['simulate=2e-2', 'reward=1']) == {
    'simulate': 0.02,
    'reward': 1.0,
  }
  for text in 'simulate', 'simulate=fast', 'simulate=-1', '=1', 'a=inf':
    with pytest.raises(ValueError, match='should be the name of a host stage'):
      host_timing.parse([text])
  with pytest.raises(ValueError, match="'reward' are given twice, 1 and 2"):
    host_timing.parse(['reward=1', 'simulate=1', 'reward=2'])
  flow = plan_report_test.flow()
  host_timing.check(flow, {'reward': 1.0})
  with pytest.raises(ValueError, match='given for simulate, and .* are reward'):
    host_timing.check(flow, {'simulate': 1.0})
