"""Draws who does what when: a lane a place, time to the right, as SVG.

Colors are variables of the page around it, so that one picture serves a light
and a dark page. A unit of a picture is a CSS pixel.
"""

from collections.abc import Iterable, Mapping, Sequence
import html
import math
from typing import Any

LANE, GAP, AXIS, TOP = 34, 10, 26, 4  # Pixels.
LETTER = 6.6  # Pixels of a letter, about.
THINNEST = 0.7  # Pixels of a bar: thinner ones would vanish.


def draw(
  spans: Sequence[Mapping[str, Any]],
  lanes: Sequence[str],
  colors: Mapping[str, int],
  *,
  end: float,
  seconds: float,
  left: int,
  width: int,
) -> str:
  """Draws spans.

  Args:
    spans: each with `place`, `what`, `stage` (None for what only moves), and
      `start` and `end` in seconds.
    lanes: places, from top to bottom.
    colors: number of the color --s1 … of each stage.
    end: seconds of a step.
    seconds: that there is room for: two pictures with as many have one scale.
    left: pixels for the names of lanes, as `margin` has it.
    width: pixels.
  """
  scale = (width - left - 8) / seconds if seconds else 0.0
  height = TOP + len(lanes) * (LANE + GAP) + AXIS
  parts = [_axis(seconds, scale, left, height)]
  for i, lane in enumerate(lanes):
    y = TOP + i * (LANE + GAP)
    parts.append(
      f'<text x="{left - 12}" y="{y + LANE / 2 + 4.5:g}" text-anchor="end" '
      f'class="lane">{html.escape(lane)}</text>'
      f'<rect x="{left}" y="{y}" width="{end * scale:.2f}" '
      f'height="{LANE}" rx="4" class="idle"/>'
    )
    mine = [span for span in spans if span['place'] == lane]
    for span in _joined(mine, THINNEST / scale if scale else 0.0):
      parts.append(_bar(span, colors, left, y, scale))
  return (
    f'<svg viewBox="0 0 {width} {height}" role="img">{"".join(parts)}</svg>'
  )


def margin(lanes: Iterable[str]) -> int:
  """Pixels that the names of lanes need."""
  return 14 + math.ceil(7.5 * max(map(len, lanes)))


def _joined(spans, thinnest: float) -> list[dict[str, Any]]:
  """Neighbors that are the same and between which no eye sees a gap."""
  joined = []
  for span in sorted(spans, key=lambda span: span['start']):
    last = joined[-1] if joined else None
    same = last and all(last[k] == span[k] for k in ('stage', 'what', 'step'))
    if same and span['start'] - last['end'] < thinnest / 2:
      last['end'] = span['end']
      last['calls'] += 1
    else:
      joined.append(dict(span, calls=1))
  return joined


def _bar(span, colors, left: int, y: int, scale: float) -> str:
  name = span['stage']
  x, wide = left + span['start'] * scale, span['end'] - span['start']
  said = name or {'run': 'moves rows'}.get(span['what'], span['what'])
  calls = f' in {span["calls"]} calls' * (span['calls'] > 1)
  step = f', step {span["step"]:+d}' * bool(span['step'])
  title = f'{said}: {wide:.3g} s{calls}, from {span["start"]:.3g} s{step}'
  pixels = max(wide * scale, THINNEST)
  fill = f'var(--s{colors[name]})' if name else 'var(--soft)'
  bar = (
    f'<rect x="{x:.2f}" y="{y}" width="{pixels:.2f}" height="{LANE}" '
    f'rx="{min(3, pixels / 3):.2g}" fill="{fill}"/>'
  )
  if len(said) * LETTER + 10 < pixels:
    bar += (
      f'<text x="{x + pixels / 2:.2f}" y="{y + LANE / 2 + 4:g}" '
      f'text-anchor="middle" class="inside">{html.escape(said)}</text>'
    )
  return f'<g><title>{html.escape(title)}</title>{bar}</g>'


def _axis(seconds: float, scale: float, left: int, height: int) -> str:
  """Hair lines at round numbers of seconds, or of parts of seconds."""
  unit, times = next(
    ((u, n) for u, n in (('s', 1), ('ms', 1e3)) if seconds * n >= 1),
    ('µs', 1e6),
  )
  parts = []
  step = _round(seconds * times / 6) if seconds else 1.0
  for i in range(math.floor(seconds * times / step + 1e-9) + 1):
    x = left + i * step / times * scale
    parts.append(
      f'<line x1="{x:.2f}" x2="{x:.2f}" y1="0" y2="{height - AXIS}" '
      f'class="hair"/><text x="{x:.2f}" y="{height - 8}" text-anchor="middle" '
      f'class="tick">{i * step:g}{f" {unit}" * (not i)}</text>'
    )
  return ''.join(parts)


def _round(x: float) -> float:
  """The least of 1, 2, 2.5, 5 × 10ⁿ that is no less."""
  power = 10 ** math.floor(math.log10(x))
  return next(n * power for n in (1, 2, 2.5, 5, 10) if n * power >= x * 0.999)
