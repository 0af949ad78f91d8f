"""Draws a timeline as SVG: one track per place, time to the right.

Colors are CSS variables of the surrounding page, so that one picture fits a
light and a dark page. Units are CSS pixels.
"""

from collections.abc import Iterable, Mapping, Sequence
import html
import math
from typing import Any

TRACK, GAP, AXIS, TOP = 34, 10, 26, 4  # Heights in pixels.
LETTER = 6.6  # Mean width of a letter in pixels.
THINNEST = 0.7  # Least width of a bar in pixels, to be visible.


def draw(
  spans: Sequence[Mapping[str, Any]],
  tracks: Sequence[str],
  colors: Mapping[str, int],
  *,
  end: float,
  seconds: float,
  left: int,
  width: int,
) -> str:
  """Draws spans.

  Args:
    spans: each with `place`, `what`, `stage` (None where data only moves),
      `step`, `start` and `end` in seconds, and, where a batch is cut, `piece`:
      its index and the number of pieces.
    tracks: places, from top to bottom.
    colors: number of the color --s1 … of each stage.
    end: seconds of a step.
    seconds: range of the time axis; equal ranges make pictures comparable.
    left: pixels for the names of tracks, as `margin` returns.
    width: pixels.
  """
  scale = (width - left - 8) / seconds if seconds else 0.0
  height = TOP + len(tracks) * (TRACK + GAP) + AXIS
  parts = [_axis(seconds, scale, left, height)]
  for i, track in enumerate(tracks):
    y = TOP + i * (TRACK + GAP)
    parts.append(
      f'<text x="{left - 12}" y="{y + TRACK / 2 + 4.5:g}" text-anchor="end" '
      f'class="track">{html.escape(track)}</text>'
      f'<rect x="{left}" y="{y}" width="{end * scale:.2f}" '
      f'height="{TRACK}" rx="4" class="idle"/>'
    )
    own = [span for span in spans if span['place'] == track]
    for span in _merged(own, THINNEST / scale if scale else 0.0):
      parts.append(_bar(span, colors, left, y, scale))
  return (
    f'<svg viewBox="0 0 {width} {height}" role="img">{"".join(parts)}</svg>'
  )


def margin(tracks: Iterable[str]) -> int:
  """The pixels that the names of tracks need."""
  return 14 + math.ceil(7.5 * max(map(len, tracks)))


def _merged(spans, thinnest: float) -> list[dict[str, Any]]:
  """Merges neighboring spans of a stage whose gap is too small to be seen."""
  merged = []
  for span in sorted(spans, key=lambda span: span['start']):
    last = merged[-1] if merged else None
    alike = 'stage', 'what', 'step', 'piece'
    same = last and all(last.get(k) == span.get(k) for k in alike)
    if same and span['start'] - last['end'] < thinnest / 2:
      last['end'] = span['end']
      last['calls'] += 1
    else:
      merged.append(dict(span, calls=1))
  return merged


def _bar(span, colors, left: int, y: int, scale: float) -> str:
  name = span['stage']
  x, seconds = left + span['start'] * scale, span['end'] - span['start']
  label = name or {'run': 'moves rows'}.get(span['what'], span['what'])
  calls = f' in {span["calls"]} calls' * (span['calls'] > 1)
  step = f', step {span["step"]:+d}' * bool(span['step'])
  piece, pieces = span.get('piece') or (0, 1)
  number = f' {piece + 1}' if pieces > 1 else ''
  of_pieces = f', piece{number} of {pieces}' if number else ''
  title = (
    f'{label}{of_pieces}: {seconds:.3g} s{calls}, '
    f'from {span["start"]:.3g} s{step}'
  )
  pixels = max(seconds * scale, THINNEST)
  fill = f'var(--s{colors[name]})' if name else 'var(--soft)'
  bar = (
    f'<rect x="{x:.2f}" y="{y}" width="{pixels:.2f}" height="{TRACK}" '
    f'rx="{min(3, pixels / 3):.2g}" fill="{fill}"/>'
  )
  texts = f'{label}{number}', label if not number else number.strip()
  fitting = (text for text in texts if len(text) * LETTER + 10 < pixels)
  if label := next(fitting, ''):
    bar += (
      f'<text x="{x + pixels / 2:.2f}" y="{y + TRACK / 2 + 4:g}" '
      f'text-anchor="middle" class="inside">{html.escape(label)}</text>'
    )
  return f'<g><title>{html.escape(title)}</title>{bar}</g>'


def _axis(seconds: float, scale: float, left: int, height: int) -> str:
  """Vertical lines at round numbers of seconds, or of ms or µs."""
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
  """The smallest of 1, 2, 2.5, 5 × 10ⁿ that is at least `x`."""
  power = 10 ** math.floor(math.log10(x))
  return next(n * power for n in (1, 2, 2.5, 5, 10) if n * power >= x * 0.999)
