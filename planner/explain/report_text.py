"""The sentences of a plan report."""

from collections.abc import Mapping, Sequence
import math
from typing import Any

from planner import formatting
from planner.explain import sensitivity as sensitivity_lib

FAR = sensitivity_lib.ASSUMED_FACTORS
LITTLE = 0.005  # Of a step: a smaller slack is reported as none.


def by(factor: float) -> str:
  """Formats a factor: `+10 %`, `× 10`, `÷ 10`."""
  if factor >= 2:
    return f'× {factor:g}'
  if factor <= 0.5:
    return f'÷ {1 / factor:g}'
  return f'{100 * (factor - 1):+.0f} %'.replace('-', '−')


def at_most(share: float) -> str:
  """Formats an upper bound in percent, rounded up: `0.1 %` for 0.0004."""
  return f'{math.ceil(1000 * share - 1e-9) / 10:.1f} %'


def known(shares: Mapping[str, float]) -> str:
  """Says how much of a step is measured, modeled and assumed.

  Args:
    shares: of the seconds of its calls, by how they are known.
  """
  percents = {tag: round(100 * share) for tag, share in shares.items()}
  some = {tag: n for tag, n in percents.items() if n}
  if len(some) < 2:
    return f'The seconds of its calls are {"".join(some) or "zero"}.'
  parts = ', '.join(f'{n} % {tag}' for tag, n in some.items())
  return f'The seconds of its calls: {parts}.'


def guess(data: Mapping[str, Any]) -> list[str]:
  """Says whether the choice of the plan hangs on what is assumed."""
  costs = list(dict.fromkeys(data['guesses']))
  if not costs:
    return []
  return [
    'This choice is a guess: another plan would be faster if '
    f'{" or ".join(costs)} took ten times or a tenth of the seconds that are '
    'assumed.'
  ]


def runners_up(data: Mapping[str, Any]) -> list[str]:
  """Lists the plans after the fastest, and why they are slower."""
  lines = []
  for entry in data['ranked'][1:]:
    lines.append(f'  {slower(entry)}')
    lines.append(f'          {entry["reason"]}')
  return ['The next fastest of the simulated plans:', *lines] if lines else []


def slower(entry: Mapping[str, Any]) -> str:
  """Names a plan, after how much longer than the fastest its steps take."""
  return f'{100 * entry["relative_slowdown"]:+.1f} %  {entry["summary"]}'


def comparisons(data: Mapping[str, Any]) -> list[str]:
  """Compares the fastest plan with plans that a reader would ask about."""
  lines = []
  for entry in data['alternatives']:
    if 'refused' in entry:
      lines.append(f'{entry["title"]} {entry["refused"]}')
      continue
    slowdown = 100 * entry['relative_slowdown']
    lines.append(
      f'{entry["title"]} takes {formatting.digits(entry["seconds"])} s, '
      f'{slowdown:+.1f} %: '
      f'{entry["reason"]}.'
    )
  return lines


def shortage(data: Mapping[str, Any]) -> list[str]:
  """Says what the plan nearest to fitting lacks, and which bindings help."""
  found = data.get('shortage')
  if not found:
    return []
  lines = [f'Of the nearest, {found["lacks"]}']
  if found['bindings']:
    lines += ['What would help, one at a time:']
  return lines + [f'  {line}' for line in found['bindings']]


def slack(data: Mapping[str, Any]) -> str:
  """Lists how much longer each stage could take, the least slack first."""
  step, lines = data['seconds'], []
  known = [stage for stage in data['stages'] if stage['slack'] is not None]
  some = sorted(known, key=lambda stage: stage['slack'])
  tight = [s['name'] for s in some if s['slack'] < LITTLE * step]
  loose = [
    f'{s["name"]} {formatting.seconds(s["slack"])}'
    for s in some
    if s['slack'] >= LITTLE * step
  ]
  unknown = [s['name'] for s in data['stages'] if s['slack'] is None]
  if not loose and not unknown:
    return 'No stage has slack: any that takes longer makes the step longer.'
  if tight:
    lines.append(f'Stages without slack: {", ".join(tight)}.')
  if loose:
    lines.append(
      'Slack, by which a stage could take longer and the step would not: '
      f'{", ".join(loose)}.'
    )
  if unknown:
    names = ', '.join(unknown) if known else 'all stages'
    lines.append(f'Time was up before the slack of {names} was computed.')
  return ' '.join(lines)


def sensitivity(data: Mapping[str, Any]) -> list[str]:
  """Lists the costs that would change the choice if they were wrong."""
  changes: Sequence[Mapping[str, Any]] = data['sensitivity']
  if not changes:
    return ['  Not computed: time was up.'] * bool(data['sensitivity_left'])
  flips = [c for c in changes if c['plan']]
  flips.sort(key=lambda c: -c['gain'])
  unsure = sum(not c['proved'] for c in changes)
  lines = [
    f'  {c["cost"]} {by(c["factor"])}: {100 * c["gain"]:.1f} % faster with '
    f'{c["summary"]}'
    + ' (at least: the search was stopped)'
    * (not c['proved'])
    for c in flips
  ]
  rest = (
    f'{"No other" if flips else "None"} of {len(changes)} changes of one cost '
    'by a tenth would change the choice'
  )
  if any(c['factor'] in FAR for c in changes):
    rest = rest.replace('a tenth', 'a tenth (what is assumed: by ten times)')
  if unsure:
    rest += (
      f', as far as is known: for {unsure} of them only the plans already '
      'simulated were compared'
    )
  if data['sensitivity_left']:
    rest += f'; time was up for {data["sensitivity_left"]} more'
  return [*lines, f'  {rest}.']
