"""Seconds of spans."""

import pytest

from rlinf_jax.runtime import timeline


def test_spans_add_up_by_stage():
  line = timeline.Timeline()
  for stage in 'aba':
    line.add(1, 'all', 'run', stage, line.now())
  spans = line.take()
  assert [span.stage for span in spans] == ['a', 'b', 'a']
  assert set(timeline.seconds(spans)) == {'a', 'b'}
  assert line.take() == []


def test_simulators_are_idle_while_none_of_their_calls_is_served():
  line = timeline.Timeline()

  def spans(what, stage, place, *intervals):
    line.extend(
      timeline.Span(1, place, what, stage, (1, 1), start, end, 0.0)
      for start, end in intervals
    )

  # Of ten seconds, one process works for eight and the other for six. The
  # policy acts for five of them, and before and after.
  spans('elsewhere', 'simulate', 'simulators 0', (2.0, 6.0), (8.0, 12.0))
  spans('elsewhere', 'simulate', 'simulators 1', (2.0, 5.0), (8.0, 11.0))
  spans('run', 'act', 'all', (0.0, 3.0), (5.0, 9.0), (12.0, 13.0))
  spans('run', 'simulate', 'all', (3.0, 5.0))
  idle = timeline.idle_fractions(line.take())
  assert idle == {
    'simulators': pytest.approx(0.3),
    'policy': pytest.approx(0.5),
  }
  assert timeline.idle_fractions([]) == {}
