"""An HTML page about a plan: its timeline, and why no other plan is faster.

The page is made from the data that --plan_json writes.
"""

from collections.abc import Mapping, Sequence
import html
import json
from typing import Any

from planner import formatting
from planner.explain import report_text
from planner.simulation import simulate
from rlinf_jax.report.html import compiled_table, page, terms, timeline_svg

WIDTH = 1082  # Pixels inside a card.
PLACES_NOTE = 'busy time as a share of the step, and peak memory'
COLORS = 7  # Stages with a color of their own; the others share the eighth.


def text(data: Mapping[str, Any]) -> str:
  """The page of a plan, from the data of `planner.explain.plan_data`."""
  cluster, is_feasible = data['cluster'], 'plan' in data
  memory = formatting.byte_size(cluster['memory'])
  kind = f'{cluster["devices"]} × {cluster["device"]}, {memory} each'
  return page.render(
    'plan_template.html',
    kind=html.escape(kind),
    state='finished' if _is_fastest(data) else 'unfinished',
    proof=_proof(data),
    summary=html.escape(_summary(data)),
    figures=page.key_figures(_key_figures(data)) if is_feasible else '',
    body=_feasible(data) if is_feasible else _infeasible(data),
  )


def _is_fastest(data) -> bool:
  return 'plan' in data and not data['searched']['gap']


def _proof(data) -> str:
  """Says what the search has proved of the plan, or of all plans."""
  gap = data['searched']['gap']
  if 'plan' not in data:
    if data['searched']['proved']:
      return 'no plan fits'
    return 'no plan was found, and nothing is proved'
  if gap == 1:
    return 'nothing is proved of it'
  if gap:
    # A fraction of its seconds; of those of a faster plan, it is more.
    slower = report_text.at_most(gap / (1 - gap))
    return f'at most {slower} slower than the fastest'
  return 'proved to be the fastest'


def _feasible(data) -> str:
  colors = _colors(data)
  parts = [
    '<div class="grid">',
    _timelines(data, colors),
    '</div><h2>Places and stages</h2><div class="grid">',
    page.card(terms.term('Places'), PLACES_NOTE, _places(data), '', 'third'),
    page.card(
      terms.term('Stages'),
      'slack: how much longer a stage could take without slowing the step',
      _stages(data, colors),
      '',
      'two-thirds',
    ),
    '</div>',
    _compiled(data),
    '<h2>Why this plan</h2><div class="grid">',
    page.card(
      'The fastest plans',
      'of the plans that were simulated',
      _ranked(data),
      '',
      'whole',
    ),
    page.card(
      'What would change the choice',
      'one cost at a time, 10 % higher or lower; what is assumed, ten times',
      _list(report_text.sensitivity(data)),
      '',
      'whole',
    ),
    '</div>',
    _infeasible(data),
    '<h2>Details</h2>',
    _details('The plan, as a run reads it', data['plan']),
    _details('The search', data['space'] | data['searched']),
  ]
  return ''.join(parts)


def _compiled(data) -> str:
  compiled = data.get('compiled')
  return compiled_table.section(compiled) if compiled else ''


def _summary(data) -> str:
  if 'plan' not in data:
    if data['searched']['proved']:
      return 'No plan in the searched space fits in memory (proved).'
    return 'No plan was found before the search was stopped; there may be one.'
  known = report_text.known(data['known'])
  tools = [data.get('answers'), data.get('answers_measured')]
  lines = [data.get('evaluations'), data['bottleneck'], *tools, known]
  lines += report_text.guess(data)
  return ' '.join(filter(None, lines))


def _key_figures(data) -> list[tuple[str, str, str]]:
  figures = [
    ('per step', f'<b>{formatting.seconds(data["seconds"])}</b>', 'headline')
  ]
  for alternative in data['alternatives'][:1]:
    if 'seconds' in alternative:
      less = 1 - data['seconds'] / alternative['seconds']
      word = 'less' if less >= 0 else 'more'
      label = f'{word}: {alternative["title"]}'.replace(': The', ' than the')
      figures.append((label, f'<b>{abs(less):.0%}</b>', ''))
  plan = data['plan']
  used = sum(len(place['devices']) for place in plan['places'].values())
  available = data['cluster']['devices']
  figures.append((f'of {available} devices', f'<b>{used}</b>', ''))
  for n, singular, plural in (
    (len(plan['places']), 'place', 'places'),
    (plan['pieces'], 'piece', 'pieces'),
  ):
    word = terms.term(singular if n == 1 else plural)
    figures.append((word, f'<b>{n}</b>', ''))
  return figures


def _colors(data) -> dict[str, int]:
  """Assigns colors to stages; the longest get colors of their own."""
  seconds = {stage['name']: stage['seconds'] for stage in data['stages']}
  spans = [*data['timeline']]
  for alternative in data['alternatives']:
    spans += alternative.get('timeline', ())
  names = dict.fromkeys([*seconds, *(s['stage'] for s in spans if s['stage'])])
  names = sorted(names, key=lambda name: -seconds.get(name, 0.0))
  return {name: min(i, COLORS) + 1 for i, name in enumerate(names)}


def _timelines(data, colors) -> str:
  """Timelines of the plan and of the alternatives, on one scale."""
  unproved = data['searched']['gap'] == 1
  plans = [('This plan' if unproved else 'The fastest plan', data)]
  plans += [
    (alternative['title'], alternative) for alternative in data['alternatives']
  ]
  shown = [
    (title, plan)
    for title, plan in plans
    if 'timeline' in plan and (plan is data or plan['plan'] != data['plan'])
  ]
  longest = max(plan['seconds'] for _, plan in shown)
  left = timeline_svg.margin(
    track for _, plan in shown for track in _tracks(plan)
  )
  cards = []
  for title, plan in shown:
    picture = timeline_svg.draw(
      plan['timeline'],
      _tracks(plan),
      colors,
      end=plan['seconds'],
      seconds=longest,
      left=left,
      width=WIDTH,
    )
    drawn = {span['stage'] for span in plan['timeline']}
    note = _legend({n: c for n, c in colors.items() if n in drawn})
    if None in drawn:
      note += ' <span class="key" style="--c: var(--soft)">moves</span>'
    seconds = formatting.seconds(plan['seconds'])
    cards.append(page.card(title, note, picture, seconds, 'whole'))
  for alternative in data['alternatives']:
    if 'refused' in alternative:
      body = _list([f'It {alternative["refused"]}'])
      cards.append(page.card(alternative['title'], '', body, '', 'whole'))
  return ''.join(cards)


def _tracks(plan) -> list[str]:
  """Places, each followed by the tracks of its asynchronous stages."""
  used = {span['place'] for span in plan['timeline']}
  tracks = []
  for place in plan['plan']['places']:
    outside = (simulate.background(place, s) for s in plan['plan']['stages'])
    tracks += [place, *(track for track in outside if track in used)]
  return tracks


def _legend(colors: Mapping[str, int]) -> str:
  """A legend in which stages of the same color share one entry."""
  own = {name: c for name, c in colors.items() if c <= COLORS}
  rest = [name for name, c in colors.items() if c > COLORS]
  if rest:
    own[', '.join(rest)] = COLORS + 1
  return page.legend(own)


def _tag(tag: str) -> str:
  return f'<span class="tag {tag}">{terms.term(tag)}</span>'


def _places(data) -> str:
  """Devices, stages, busy time and memory of every place."""
  capacity = data['cluster']['capacity']
  parts_html = []
  for place in data['places']:
    mesh = ' '.join(f'{axis}={size}' for axis, size in place['axes'])
    n = len(place['devices'])
    devices = f'{n} device{"s" * (n > 1)} {mesh}'.strip()
    share = place['busy_seconds'] / data['seconds'] if data['seconds'] else 0.0
    memory = place['memory']
    parts, during = memory['parts'], memory['during']
    during = f', highest during {during}' * bool(during)
    parts_html.append(
      f'<div class="place"><p><b>{html.escape(place["name"])}</b>'
      f'<span>{devices}</span></p>'
      f'<small>{html.escape(" → ".join(place["stages"]))}</small>'
      f'<p><small>busy {share:.0%} of the step</small></p>'
      f'{_meter([(share, 1)])}'
      f'<p><small>{formatting.byte_size(memory["bytes"])} of '
      f'{formatting.byte_size(capacity)} usable on each device'
      f'{during} '
      f'{_tag(memory["tag"])}</small></p>'
      + _meter(
        [(p['bytes'] / capacity, 2 + i % 6) for i, p in enumerate(parts)]
      )
      + f'<div class="legend">{_parts(parts)}</div></div>'
    )
  return ''.join(parts_html)


def _meter(shares: Sequence[tuple[float, int]]) -> str:
  """A horizontal bar of (share, color) segments."""
  bars = ''.join(
    f'<div style="width: {100 * min(share, 1.0):.3f}%; --c: var(--s{color})">'
    '</div>'
    for share, color in shares
  )
  return f'<div class="meter">{bars}</div>'


def _parts(parts) -> str:
  """A legend of the parts of a place's memory."""
  return ''.join(
    page.legend_entry(
      f'{p["what"]} {formatting.byte_size(p["bytes"])}'
      + f' ({p["tag"]})' * (p['tag'] != 'modeled'),
      2 + i % 6,
    )
    for i, p in enumerate(parts)
  )


def _stages(data, colors) -> str:
  """A table of stages: place, seconds and slack, the longest first."""
  rows = []
  for stage in sorted(data['stages'], key=lambda s: -s['seconds']):
    name = stage['name']
    is_critical, slack = False, 'time was up'
    if stage['slack'] is not None:
      is_critical = stage['slack'] < report_text.LITTLE * data['seconds']
      slack = 'none' if is_critical else formatting.seconds(stage['slack'])
    size, policy = stage['micro_batch'], stage['remat']
    how = [f'micro-batches of {size} rows'] * bool(size)
    how += [f'remat {policy}'] * bool(policy)
    if data.get('waiting', {}).get(name):
      how += ['all of it waiting for answers of tools, and no work']
    small = f' <small>{", ".join(how)}</small>' if how else ''
    rows.append(
      f'<tr><td>{page.legend_entry(name, colors[name])}'
      f'{small}</td>'
      f'<td class="text">{html.escape(stage["place"])}</td>'
      f'<td class="text">{terms.term(stage["grain"])}</td>'
      f'<td class="nowrap">{formatting.seconds(stage["seconds"])}</td>'
      f'<td class="nowrap {"bad" if is_critical else ""}">{slack}</td>'
      f'<td>{_tag(stage["tag"])}</td></tr>'
    )
  return (
    f'<table><tr><th>{terms.term("stage")}</th>'
    f'<th class="text">{terms.term("place")}</th>'
    f'<th class="text">{terms.term("grain")}</th><th>per step</th>'
    f'<th>{terms.term("slack")}</th><th></th></tr>{"".join(rows)}</table>'
  )


def _ranked(data) -> str:
  """A table of plans, the fastest first, and why each is not faster."""
  rows = []
  entries = [(entry, '') for entry in data['ranked']]
  entries += [
    (alternative, f'{alternative["title"]}: ')
    for alternative in data['alternatives']
    if 'seconds' in alternative
  ]
  longest = max(entry['seconds'] for entry, _ in entries)
  for entry, title in entries:
    parts = entry['parts']
    segments = [(parts['work'], 1), (parts['waits'], 8), (parts['moves'], 5)]
    bar = _meter([(n / longest, color) for n, color in segments])
    rows.append(
      f'<tr><td class="nowrap">{100 * entry["relative_slowdown"]:+.1f} %</td>'
      f'<td class="nowrap">{formatting.seconds(entry["seconds"])}{bar}</td>'
      f'<td class="text">{html.escape(title + entry["summary"])}'
      f'<small>{html.escape(entry["reason"])}</small></td></tr>'
    )
  colors = {'busy (busiest place)': 1, 'waiting': 8, 'moving data': 5}
  return (
    f'<table class="plans">{"".join(rows)}</table>'
    f'<div class="legend">{page.legend(colors)}</div>'
  )


def _list(lines: Sequence[str]) -> str:
  items = ''.join(f'<li>{html.escape(line.strip())}</li>' for line in lines)
  return f'<ul class="list">{items}</ul>'


def _infeasible(data) -> str:
  lines = [entry['reason'] for entry in data['infeasible']]
  if not lines:
    return ''
  body = page.card(
    'Plans that need too much memory',
    'closest to fitting first',
    _list(lines),
    '',
    'whole',
  )
  if lines := report_text.shortage(data):
    body += page.card('What the nearest lacks', '', _list(lines), '', 'whole')
  return f'<h2>Infeasible plans</h2><div class="grid">{body}</div>'


def _details(title: str, data) -> str:
  text = html.escape(json.dumps(data, indent=2))
  return (
    f'<details class="card"><summary>{title}</summary><pre>{text}</pre>'
    '</details>'
  )
