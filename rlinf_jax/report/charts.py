"""Pictures of a run, as SVG that takes its colors from the page around it.

Matplotlib knows no CSS: pictures are drawn in stand-in colors, which
`_svg` exchanges for the page's variables, so that one picture serves a light
and a dark page. A unit of a picture is a CSS pixel.
"""

from collections.abc import Mapping, Sequence
import io
import re
from typing import Any, NamedTuple

import matplotlib
from matplotlib import figure, ticker
import numpy as np

SERIES = 8  # Colors --s1 … --s8 of the page.
MOST_POINTS = 400  # Of a line: more cannot be told apart at this size.
STAND_INS = {'ink': '#010101', 'soft': '#020202', 'line': '#030303'}
STAND_INS |= {f's{i}': f'#0000{i:02x}' for i in range(1, SERIES + 1)}

STYLE = {
  'svg.fonttype': 'none',
  'svg.hashsalt': 'rlinf_jax',
  'font.family': 'DejaVu Sans',
  'font.size': 11,
  'text.color': STAND_INS['ink'],
  'xtick.color': STAND_INS['soft'],
  'ytick.color': STAND_INS['soft'],
  'xtick.labelsize': 11,
  'ytick.labelsize': 11,
  'axes.edgecolor': STAND_INS['line'],
  'axes.labelcolor': STAND_INS['soft'],
  'axes.spines.top': False,
  'axes.spines.right': False,
  'axes.spines.left': False,
  'axes.grid': True,
  'axes.xmargin': 0.02,
  'axes.axisbelow': True,
  'grid.color': STAND_INS['line'],
  'xtick.major.size': 0,
  'ytick.major.size': 0,
  'lines.solid_capstyle': 'round',
  'lines.solid_joinstyle': 'round',
}


class Line(NamedTuple):
  """One curve: `value` over `step`, drawn in color --s`color`."""

  step: np.ndarray
  value: np.ndarray
  color: int = 1
  points: bool = False  # Few and exact: dots, never smoothed.


def curves(
  lines: Sequence[Line],
  *,
  width: int,
  height: int,
  percent: bool = False,
  base: float | None = None,
) -> str:
  """Draws curves over steps.

  Noisy ones are drawn faint, under their moving average.

  Args:
    lines: what to draw, the most important last.
    width: pixels.
    height: pixels.
    percent: the values are shares of one, shown from 0 to 100 %.
    base: a level to compare with, dashed.
  """
  with matplotlib.rc_context(STYLE):
    canvas, axes = _axes(width, height)
    if base is not None:
      axes.axhline(base, color=STAND_INS['soft'], lw=1, ls=(0, (4, 4)))
    for line in lines:
      _draw(axes, line)
    axes.xaxis.set_major_locator(ticker.MaxNLocator(6, integer=True))
    if percent:
      axes.set_ylim(-0.02, 1.04)
      axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
      axes.yaxis.set_major_formatter(ticker.PercentFormatter(1, decimals=0))
    else:
      _limit(axes, [thin(line.value) for line in lines])
      axes.yaxis.set_major_locator(_round_numbers())
      axes.yaxis.set_major_formatter(ticker.StrMethodFormatter('{x:g}'))
    return _svg(canvas)


def _draw(axes, line: Line) -> None:
  color = STAND_INS[f's{line.color}']
  finite = np.where(np.isfinite(line.value), line.value, np.nan)
  step, value = thin(line.step), thin(finite)
  marker = {'marker': 'o', 'ms': 5} if line.points or len(step) < 3 else {}
  average = value if line.points else smooth(value)
  if np.array_equal(average, value, equal_nan=True):
    axes.plot(step, value, color=color, lw=2, **marker)
  else:
    axes.plot(step, value, color=color, lw=1, alpha=0.3)
    axes.plot(step, average, color=color, lw=2)


def _round_numbers() -> ticker.Locator:
  return ticker.MaxNLocator(4, steps=[1, 2, 2.5, 5, 10])


def _run(value: np.ndarray) -> int:
  return max(1, -(-len(value) // MOST_POINTS))


def thin(value: np.ndarray) -> np.ndarray:
  """Means of runs of neighbors, at most `MOST_POINTS` of them."""
  run = _run(value)
  parts = [value[i : i + run] for i in range(0, len(value), run)]
  return np.array([part.mean() for part in parts])


def smooth(value: np.ndarray) -> np.ndarray:
  """A centered moving average where `value` is noisy, else `value` itself.

  Numbers that are not finite stay holes; outliers count as the end of the
  usual range, or a single one would lift all its neighbors.
  """
  fine = np.isfinite(value)
  seen = value[fine]
  if seen.size < 24:
    return value
  tame = np.clip(seen, *_usual(seen))
  if np.abs(np.diff(tame)).mean() < 0.02 * np.ptp(tame):
    return value
  window = np.ones(seen.size // 12 | 1)
  counted = np.zeros(len(value))
  counted[fine] = tame
  total = np.convolve(counted, window, 'same')
  count = np.convolve(fine.astype(float), window, 'same')
  return np.where(fine, total / np.maximum(count, 1.0), np.nan)


def _usual(value: np.ndarray) -> tuple[float, float]:
  """The range of `value` without spikes of one or two points.

  That of its running median, widened by how far most points are from it; all
  numbers if that is a single one, for then what differs is the news.
  """
  around = np.lib.stride_tricks.sliding_window_view(
    np.pad(value, 2, mode='reflect'), 5
  )
  median = np.median(around, axis=1)
  room = np.quantile(np.abs(value - median), 0.98)
  low, high = median.min() - room, median.max() + room
  return (low, high) if low < high else (-np.inf, np.inf)


def _limit(axes, values: Sequence[np.ndarray]) -> None:
  """Keeps a few spikes from pressing everything else flat."""
  values = [value[np.isfinite(value)] for value in values]
  ranges = [_usual(value) for value in values if value.size >= 24]
  if len(ranges) < len(values):
    return
  low, high = min(r[0] for r in ranges), max(r[1] for r in ranges)
  value = np.concatenate(values)
  room = (high - low) / 2
  if high < value.max() - room or value.min() + room < low:
    low, high = low - room / 8, high + room / 8
    axes.set_ylim(max(low, 0) if value.min() >= 0 else low, high)


def stacked(
  step: np.ndarray,
  seconds: Mapping[str, np.ndarray],
  colors: Mapping[str, int],
  *,
  width: int,
  height: int,
) -> str:
  """Draws the seconds of each stage over steps, one on the other."""
  with matplotlib.rc_context(STYLE):
    canvas, axes = _axes(width, height, margin_left=44)
    run = _run(step)
    edge = np.append(step[::run], step[-1] + 1) - 0.5
    base = np.zeros(len(edge) - 1)
    for stage, value in seconds.items():
      top = base + np.nan_to_num(thin(value))
      axes.stairs(
        top,
        edge,
        baseline=base,
        fill=True,
        color=STAND_INS[f's{colors[stage]}'],
        lw=0,
      )
      base = top
    axes.set_xlim(edge[0], edge[-1])
    # Lower than the first step, which compiles, to show the others.
    axes.set_ylim(0, min(base.max(), 2 * np.median(base)) * 1.05 or 1)
    axes.xaxis.set_major_locator(ticker.MaxNLocator(6, integer=True))
    axes.yaxis.set_major_locator(_round_numbers())
    axes.yaxis.set_major_formatter(ticker.StrMethodFormatter('{x:g} s'))
    return _svg(canvas)


def gantt(
  records: Sequence[Mapping[str, Any]],
  colors: Mapping[str, int],
  *,
  width: int,
) -> str:
  """Draws when each stage ran: a row a stage, apart for each place.

  Args:
    records: lines of timeline.jsonl, at least one.
    colors: the color of each stage.
    width: pixels.
  """
  several = len({record['place'] for record in records}) > 1
  begin = min(record['start'] for record in records)
  end = max(record['end'] for record in records)
  thinnest = (end - begin) / width  # A pixel: thinner bars would vanish.
  rows: dict[tuple[str, str], list] = {}
  for record in sorted(records, key=lambda record: record['start']):
    row = rows.setdefault((record['place'], record['stage']), [])
    seconds = max(record['end'] - record['start'], thinnest)
    row.append((record['start'] - begin, seconds))
  if several:
    rows = dict(sorted(rows.items(), key=lambda item: item[0][0]))
  names = [f'{p} · {stage}' if several else stage for p, stage in rows]
  with matplotlib.rc_context(STYLE):
    left = 16 + 7 * max(map(len, names))
    canvas, axes = _axes(width, 54 + 24 * len(rows), margin_left=left, top=22)
    for y, ((_, stage), bars) in enumerate(rows.items()):
      color = STAND_INS[f's{colors[stage]}']
      axes.broken_barh(bars, (y - 0.36, 0.72), color=color, lw=0)
    for step in sorted({record['step'] for record in records}):
      start = min(r['start'] for r in records if r['step'] == step) - begin
      axes.axvline(start, color=STAND_INS['soft'], lw=1, ls=(0, (2, 3)))
      axes.text(
        start,
        1.01,
        f' step {step}',
        transform=axes.get_xaxis_transform(),
        va='bottom',
        color=STAND_INS['soft'],
      )
    axes.grid(False, axis='y')
    axes.set_xlim(0, end - begin or 1)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_yticks(range(len(rows)), names)
    axes.xaxis.set_major_formatter(ticker.StrMethodFormatter('{x:g} s'))
    return _svg(canvas)


def _axes(width: int, height: int, margin_left: int = 44, top: int = 8):
  canvas = figure.Figure(figsize=(width / 72, height / 72), facecolor='none')
  axes = canvas.add_axes(
    (
      margin_left / width,
      24 / height,
      1 - (margin_left + 10) / width,
      1 - (24 + top) / height,
    ),
    facecolor='none',
  )
  return canvas, axes


def _svg(canvas) -> str:
  """The picture as an element for a page; its texts take the page's font."""
  file = io.StringIO()
  canvas.savefig(file, format='svg')
  text = file.getvalue()
  text = text[text.index('<svg') :]
  text = re.sub(r'<metadata>.*?</metadata>', '', text, flags=re.DOTALL)
  text = re.sub(r'<defs>\s*<style.*?</style>\s*</defs>', '', text)
  text = re.sub(
    r' xmlns(:xlink)?="[^"]*"| width="[^"]*pt"| height="[^"]*pt"', '', text
  )
  text = re.sub(r'<g id="[^"]*"', '<g', text)
  text = re.sub(
    r"font-family: 'DejaVu Sans'; | transform=\"rotate\(-0 [^)]*\)\"", '', text
  )
  text = re.sub(r'\s*\n\s*', ' ', text)
  for name, color in STAND_INS.items():
    text = text.replace(color, f'var(--{name})')
  return text
