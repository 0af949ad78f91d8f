import json

from rlinf_jax.report import trace

LINES = [
  {
    'step': 1,
    'place': place,
    'what': what,
    'stage': stage,
    'piece': [1, 2],
    'start': start,
    'end': start + 0.5,
    'cpu': 0.25,
  }
  for place, what, stage, start in [
    ('actor', 'run', 'generate', 1.0),
    ('learner', 'wait', 'generate.action', 1.0),
    ('learner', 'run', 'gradient', 1.5),
  ]
]


def test_a_trace_has_a_track_per_place_in_microseconds(tmp_path):
  text = '\n'.join(map(json.dumps, LINES))
  (tmp_path / 'timeline.jsonl').write_text(text + '\n')
  trace.write(tmp_path)
  events = json.loads((tmp_path / 'trace.json').read_text())['traceEvents']
  names = {e['tid']: e['args']['name'] for e in events if e['ph'] == 'M'}
  assert names == {0: 'actor', 1: 'learner'}
  spans = [e for e in events if e['ph'] == 'X']
  assert [(e['name'], e['cat'], e['tid']) for e in spans] == [
    ('generate', 'run', 0),
    ('generate.action', 'wait', 1),
    ('gradient', 'run', 1),
  ]
  assert (spans[2]['ts'], spans[2]['dur']) == (1.5e6, 0.5e6)
  assert spans[0]['args']['piece'] == '1 of 2'
