"""A page about a plan: who does what when, and why no other plan is better.

It is made from the account that --plan_json writes, and from nothing else.
"""

from collections.abc import Mapping, Sequence
import html
import json
from typing import Any

from planner.explain import formatting, report_text
from planner.simulation import simulate
from rlinf_jax.report import page, timeline_svg

WHOLE = 1082  # Pixels inside a card.
COLORS = 7  # Stages with a color of their own; all others share the eighth.


def text(data: Mapping[str, Any]) -> str:
  """The page of an account, as `planner.why.account` makes it."""
  cluster, found = data['cluster'], 'plan' in data
  gap = data['searched']['gap']
  proof = 'proved the fastest' if found else 'nothing fits'
  if found and gap:
    proof = f'at most {gap:.1%} from the fastest'
  memory = formatting.byte_size(cluster['memory'])
  kind = f'{cluster["devices"]} × {cluster["device"]}, {memory} each'
  return page.render(
    'plan_template.html',
    kind=html.escape(kind),
    state='finished' if found and not gap else 'unfinished',
    proof=proof,
    story=html.escape(_story(data)),
    figures=page.figures(_figures(data)) if found else '',
    body=_found(data) if found else _infeasible(data),
  )


def _found(data) -> str:
  colors = _colors(data)
  parts = [
    '<div class="grid">',
    _timelines(data, colors),
    '</div><h2>Where everything runs</h2><div class="grid">',
    page.card('Places', _legend(), _places(data), '', 'half'),
    page.card(
      'Stages',
      'slack: how much longer one could take before a step does',
      _stages(data, colors),
      '',
      'half',
    ),
    '</div><h2>Why this one</h2><div class="grid">',
    page.card(
      'The fastest plans',
      'of those that were timed',
      _ranked(data),
      '',
      'whole',
    ),
    page.card(
      'What would change the choice',
      'one cost at a time, a tenth more or less',
      _said(report_text.sensitivity(data['sensitivity'])),
      '',
      'whole',
    ),
    '</div>',
    _infeasible(data),
    '<h2>In detail</h2>',
    _details('The plan as a run reads it', data['plan']),
    _details('What was searched', data['space'] | data['searched']),
  ]
  return ''.join(parts)


def _story(data) -> str:
  if 'plan' not in data:
    return 'No plan of those searched fits in memory.'
  return data['bottleneck']


def _figures(data) -> list[tuple[str, str, str]]:
  figures = [
    ('a step', f'<b>{formatting.seconds(data["seconds"])}</b>', 'headline')
  ]
  for beside in data['beside'][:1]:
    if 'seconds' in beside:
      less = 1 - data['seconds'] / beside['seconds']
      said = f'less: {beside["title"]}'.replace(': The', ' than the')
      figures.append((said, f'<b>{less:.0%}</b>', ''))
  plan = data['plan']
  used = sum(len(place['devices']) for place in plan['places'].values())
  there = data['cluster']['devices']
  figures.append((f'of {there} devices', f'<b>{used}</b>', ''))
  for n, one, more in (
    (len(plan['places']), 'place', 'places'),
    (plan['pieces'], 'piece', 'pieces'),
  ):
    figures.append((one if n == 1 else more, f'<b>{n}</b>', ''))
  return figures


def _colors(data) -> dict[str, int]:
  """The longest stages have colors of their own."""
  spent = {stage['name']: stage['seconds'] for stage in data['stages']}
  shown = [*data['timeline']]
  for beside in data['beside']:
    shown += beside.get('timeline', ())
  names = dict.fromkeys([*spent, *(s['stage'] for s in shown if s['stage'])])
  names = sorted(names, key=lambda name: -spent.get(name, 0.0))
  return {name: min(i, COLORS) + 1 for i, name in enumerate(names)}


def _timelines(data, colors) -> str:
  cards = [('The fastest plan', data)]
  cards += [(beside['title'], beside) for beside in data['beside']]
  shown = [
    (title, one)
    for title, one in cards
    if 'timeline' in one and (one is data or one['plan'] != data['plan'])
  ]
  longest = max(one['seconds'] for _, one in shown)
  left = timeline_svg.margin(lane for _, one in shown for lane in _lanes(one))
  made = []
  for title, one in shown:
    picture = timeline_svg.draw(
      one['timeline'],
      _lanes(one),
      colors,
      end=one['seconds'],
      seconds=longest,
      left=left,
      width=WHOLE,
    )
    there = {span['stage'] for span in one['timeline']}
    note = _keys({n: c for n, c in colors.items() if n in there})
    if None in there:
      note += ' <span class="key" style="--c: var(--soft)">moves</span>'
    now = formatting.seconds(one['seconds'])
    made.append(page.card(title, note, picture, now, 'whole'))
  for beside in data['beside']:
    if 'refused' in beside:
      said = _said([f'It cannot be had here: {beside["refused"]}'])
      made.append(page.card(beside['title'], '', said, '', 'whole'))
  return ''.join(made)


def _lanes(one) -> list[str]:
  """Places, each followed by who does what it begins ahead of its turn."""
  there = {span['place'] for span in one['timeline']}
  made = []
  for place in one['plan']['places']:
    outside = (simulate.background(place, s) for s in one['plan']['stages'])
    made += [place, *(lane for lane in outside if lane in there)]
  return made


def _keys(colors: Mapping[str, int]) -> str:
  """A legend in which stages of one color share a patch."""
  own = {name: c for name, c in colors.items() if c <= COLORS}
  rest = [name for name, c in colors.items() if c > COLORS]
  if rest:
    own[', '.join(rest)] = COLORS + 1
  return page.legend(own)


def _tag(tag: str) -> str:
  return f'<span class="tag {tag}">{tag}</span>'


def _legend() -> str:
  return 'how much of a step each works, and of its memory it needs at worst'


def _places(data) -> str:
  capacity = data['cluster']['capacity']
  made = []
  for place in data['places']:
    mesh = ' '.join(f'{axis}={size}' for axis, size in place['axes'])
    n = len(place['devices'])
    devices = f'{n} device{"s" * (n > 1)} {mesh}'.strip()
    share = place['works'] / data['seconds'] if data['seconds'] else 0.0
    memory = place['memory']
    parts, during = memory['parts'], memory['during']
    during = f', at worst during {during}' * bool(during)
    made.append(
      f'<div class="place"><p><b>{html.escape(place["name"])}</b>'
      f'<span>{devices}</span></p>'
      f'<small>{html.escape(" → ".join(place["stages"]))}</small>'
      f'<p><small>works {share:.0%} of a step</small></p>'
      f'{_meter([(share, 1)])}'
      f'<p><small>{formatting.byte_size(memory["bytes"])} of '
      f'{formatting.byte_size(capacity)} that may be used on each device'
      f'{during} '
      f'{_tag(memory["tag"])}</small></p>'
      + _meter(
        [(p['bytes'] / capacity, 2 + i % 6) for i, p in enumerate(parts)]
      )
      + f'<div class="legend">{_parts(parts)}</div></div>'
    )
  return ''.join(made)


def _meter(shares: Sequence[tuple[float, int]]) -> str:
  bars = ''.join(
    f'<div style="width: {100 * min(share, 1.0):.3f}%; --c: var(--s{color})">'
    '</div>'
    for share, color in shares
  )
  return f'<div class="meter">{bars}</div>'


def _parts(parts) -> str:
  """What memory is made of; the stage it is worst in is said once."""
  return ''.join(
    page.key(
      f'{p["what"]} {formatting.byte_size(p["bytes"])}'
      + f' ({p["tag"]})' * (p['tag'] != 'modeled'),
      2 + i % 6,
    )
    for i, p in enumerate(parts)
  )


def _stages(data, colors) -> str:
  rows = []
  for stage in sorted(data['stages'], key=lambda s: -s['seconds']):
    name = stage['name']
    tight = stage['slack'] < report_text.LITTLE * data['seconds']
    slack = 'none' if tight else formatting.seconds(stage['slack'])
    at_once = f' <small>{stage["micro_batch"]} rows at a time</small>'
    rows.append(
      f'<tr><td>{page.key(name, colors[name])}'
      f'{at_once if stage["micro_batch"] else ""}</td>'
      f'<td class="text">{html.escape(stage["place"])}</td>'
      f'<td class="nowrap">{formatting.seconds(stage["seconds"])}</td>'
      f'<td class="nowrap {"bad" if tight else ""}">{slack}</td>'
      f'<td>{_tag(stage["tag"])}</td></tr>'
    )
  return (
    '<table><tr><th>stage</th><th class="text">place</th><th>a step</th>'
    f'<th>slack</th><th></th></tr>{"".join(rows)}</table>'
  )


def _ranked(data) -> str:
  rows = []
  entries = [(entry, '') for entry in data['ranked']]
  entries += [
    (beside, f'{beside["title"]}: ')
    for beside in data['beside']
    if 'seconds' in beside
  ]
  longest = max(entry['seconds'] for entry, _ in entries)
  for entry, what in entries:
    parts = entry['parts']
    of = [(parts['work'], 1), (parts['waits'], 8), (parts['moves'], 5)]
    bar = _meter([(n / longest, color) for n, color in of])
    rows.append(
      f'<tr><td class="nowrap">+{100 * entry["more"]:.1f} %</td>'
      f'<td class="nowrap">{formatting.seconds(entry["seconds"])}{bar}</td>'
      f'<td class="text">{html.escape(what + entry["in_a_line"])}'
      f'<small>{html.escape(entry["reason"])}</small></td></tr>'
    )
  keys = {'work of the busiest place': 1, 'its waits': 8, 'moves': 5}
  return (
    f'<table class="plans">{"".join(rows)}</table>'
    f'<div class="legend">{page.legend(keys)}</div>'
  )


def _said(lines: Sequence[str]) -> str:
  items = ''.join(f'<li>{html.escape(line.strip())}</li>' for line in lines)
  return f'<ul class="said">{items}</ul>'


def _infeasible(data) -> str:
  lines = [entry['why'] for entry in data['infeasible']]
  if not lines:
    return ''
  body = page.card(
    'Too large', 'the nearest to fitting first', _said(lines), '', 'whole'
  )
  return f'<h2>What does not fit</h2><div class="grid">{body}</div>'


def _details(title: str, data) -> str:
  told = html.escape(json.dumps(data, indent=2))
  return (
    f'<details class="card"><summary>{title}</summary><pre>{told}</pre>'
    '</details>'
  )
