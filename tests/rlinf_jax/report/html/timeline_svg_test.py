import re
from xml.etree import ElementTree

import pytest

from rlinf_jax.report.html import timeline_svg


def span(place, stage, start, end, what='run', step=0):
  return {
    'place': place,
    'stage': stage,
    'start': start,
    'end': end,
    'what': what,
    'step': step,
  }


def draw(spans, names=('x', 'y'), end=2.0, seconds=2.0):
  left = timeline_svg.margin(names)
  text = timeline_svg.draw(
    spans,
    names,
    {'a': 1, 'b<': 2},
    end=end,
    seconds=seconds,
    left=left,
    width=left + 208,
  )
  return text, list(ElementTree.fromstring(text).iter('rect'))


def test_a_bar_is_as_long_as_its_stage_runs():
  text, bars = draw([span('x', 'a', 0.0, 0.5), span('y', 'b<', 0.5, 2.0)])
  filled = [bar for bar in bars if bar.get('fill')]
  assert [float(bar.get('width')) for bar in filled] == [50.0, 150.0]
  assert [bar.get('fill') for bar in filled] == ['var(--s1)', 'var(--s2)']
  assert 'b&lt;: 1.5 s, from 0.5 s' in text


def test_tracks_end_with_the_step_and_pictures_have_one_scale():
  _, short = draw([], end=1.0)
  _, long = draw([], end=2.0)
  assert {bar.get('width') for bar in short} == {'100.00'}
  assert {bar.get('width') for bar in long} == {'200.00'}


def test_calls_that_follow_each_other_are_one_bar():
  pieces = [span('x', 'a', i / 4, (i + 1) / 4) for i in range(4)]
  text, bars = draw(pieces)
  assert len([bar for bar in bars if bar.get('fill')]) == 1
  assert 'in 4 calls' in text


def test_pieces_are_numbered():
  spans = [
    span('x', 'a', start, start + 1.0) | {'piece': (i, 2)}
    for i, start in enumerate((0.0, 1.0))
  ]
  text, bars = draw(spans)
  assert sum(bar.get('fill') is not None for bar in bars) == 2
  assert 'a, piece 1 of 2: 1 s' in text and 'a, piece 2 of 2: 1 s' in text
  assert '>a 1<' in text and '>a 2<' in text


def test_moves_have_no_color_of_a_stage():
  _, bars = draw([span('x', None, 0.0, 1.0, what='offload')])
  assert bars[1].get('fill') == 'var(--soft)'


@pytest.mark.parametrize(
  'seconds, ticks',
  [(2.0, '0 s 0.5 1 1.5 2'), (0.05, '0 ms 10 20 30 40 50')],
)
def test_the_scale_has_round_numbers(seconds, ticks):
  text, _ = draw([], seconds=seconds)
  assert ' '.join(re.findall(r'class="tick">([^<]*)<', text)) == ticks
