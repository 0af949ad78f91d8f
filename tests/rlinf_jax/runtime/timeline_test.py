"""Seconds of spans."""

from rlinf_jax.runtime import timeline


def test_spans_add_up_by_stage():
  line = timeline.Timeline()
  for stage in 'aba':
    line.add(1, 'all', 'run', stage, line.now())
  spans = line.take()
  assert [span.stage for span in spans] == ['a', 'b', 'a']
  assert set(timeline.seconds(spans)) == {'a', 'b'}
  assert line.take() == []
