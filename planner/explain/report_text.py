"""An account of a plan in words."""

from collections.abc import Mapping, Sequence
from typing import Any

from planner.explain import formatting

LITTLE = 0.005  # Of a step: less slack is none, to people.


def by(times: float) -> str:
  """A factor as people say it: `+10 %`."""
  return f'{100 * (times - 1):+.0f} %'.replace('-', '−')


def runners_up(data: Mapping[str, Any]) -> list[str]:
  """The plans that come after the fastest, and what they lose by."""
  lines = []
  for entry in data['ranked'][1:]:
    lines.append(f'  +{100 * entry["more"]:.1f} %  {entry["in_a_line"]}')
    lines.append(f'          {entry["reason"]}')
  return ['Next to it, of those timed:', *lines] if lines else []


def comparisons(data: Mapping[str, Any]) -> list[str]:
  """How the plans that it is compared with do."""
  lines = []
  for entry in data['beside']:
    if 'refused' in entry:
      lines.append(f'{entry["title"]} cannot be had: {entry["refused"]}')
      continue
    said = f'{entry["title"]} takes {entry["seconds"]:.3g} s'
    lines.append(f'{said}, {100 * entry["more"]:+.1f} %: {entry["reason"]}.')
  return lines


def slack(data: Mapping[str, Any]) -> str:
  """How much longer stages could take, the least first."""
  step = data['seconds']
  some = sorted(data['stages'], key=lambda stage: stage['slack'])
  tight = [s['name'] for s in some if s['slack'] < LITTLE * step]
  loose = [
    f'{s["name"]} {formatting.seconds(s["slack"])}'
    for s in some
    if s['slack'] >= LITTLE * step
  ]
  if not loose:
    return 'No stage has slack.'
  said = f'Without slack: {", ".join(tight)}.' if tight else ''
  said += f' Could take longer before a step does: {", ".join(loose)}.'
  return said.strip()


def sensitivity(changes: Sequence[Mapping[str, Any]]) -> list[str]:
  """Which cost would have to be wrong to change the choice."""
  if not changes:
    return []
  flips = [c for c in changes if c['plan']]
  flips.sort(key=lambda c: -c['gain'])
  unsure = sum(not c['proved'] for c in changes)
  lines = [
    f'  {c["cost"]} {by(c["times"])}: {100 * c["gain"]:.1f} % faster with '
    f'{c["in_a_line"]}'
    + ' (at least: not searched to the end)'
    * (not c['proved'])
    for c in flips
  ]
  rest = (
    f'{"No other" if flips else "None"} of {len(changes)} changes of one cost '
    'by a tenth would change the choice'
  )
  if unsure:
    rest += (
      f', as far as was searched: {unsure} of them only among plans that were '
      'timed'
    )
  return [*lines, f'  {rest}.']
