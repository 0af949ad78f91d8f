"""Charts of a run as SVG, whose colors are CSS variables of the page.

Matplotlib does not support CSS variables. Charts are therefore drawn in
placeholder colors, which `_svg` replaces by variables, so that one picture fits
a light and a dark page. Units are CSS pixels.
"""

from collections.abc import Mapping, Sequence
import io
import re
from typing import Any, NamedTuple

import matplotlib
from matplotlib import figure, ticker
import numpy as np

SERIES = 8  # Colors --s1 … --s8 of the page.
MAX_POINTS = 400  # Of a curve: more cannot be distinguished at this size.
PLACEHOLDERS = {'ink': '#010101', 'soft': '#020202', 'line': '#030303'}
PLACEHOLDERS |= {f's{i}': f'#0000{i:02x}' for i in range(1, SERIES + 1)}

STYLE = {
  'svg.fonttype': 'none',
  'svg.hashsalt': 'rlinf_jax',
  'font.family': 'DejaVu Sans',
  'font.size': 11,
  'text.parse_math': False,  # Names may have dollars.
  'text.color': PLACEHOLDERS['ink'],
  'xtick.color': PLACEHOLDERS['soft'],
  'ytick.color': PLACEHOLDERS['soft'],
  'xtick.labelsize': 11,
  'ytick.labelsize': 11,
  'axes.edgecolor': PLACEHOLDERS['line'],
  'axes.labelcolor': PLACEHOLDERS['soft'],
  'axes.spines.top': False,
  'axes.spines.right': False,
  'axes.spines.left': False,
  'axes.grid': True,
  'axes.xmargin': 0.02,
  'axes.axisbelow': True,
  'grid.color': PLACEHOLDERS['line'],
  'xtick.major.size': 0,
  'ytick.major.size': 0,
  'lines.solid_capstyle': 'round',
  'lines.solid_joinstyle': 'round',
}


class Curve(NamedTuple):
  """A curve: `value` over `step`.

  Attributes:
    step: updates finished.
    value: of the metric.
    color: number of the page's color, --s`color`.
    points: draws every value as a dot and never smooths.
  """

  step: np.ndarray
  value: np.ndarray
  color: int = 1
  points: bool = False


def curves(
  series: Sequence[Curve],
  *,
  width: int,
  height: int,
  percent: bool = False,
  base: float | None = None,
) -> str:
  """Draws curves over steps.

  Noisy curves are drawn in a light shade, with their moving average on top.

  Args:
    series: the curves; later ones are drawn on top.
    width: pixels.
    height: pixels.
    percent: whether values are fractions of one, shown from 0 to 100 %.
    base: value of a dashed horizontal line.
  """
  with matplotlib.rc_context(STYLE):
    canvas, axes = _axes(width, height)
    if base is not None:
      axes.axhline(base, color=PLACEHOLDERS['soft'], lw=1, ls=(0, (4, 4)))
    for curve in series:
      _draw(axes, curve)
    axes.xaxis.set_major_locator(ticker.MaxNLocator(6, integer=True))
    if percent:
      axes.set_ylim(-0.02, 1.04)
      axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
      axes.yaxis.set_major_formatter(ticker.PercentFormatter(1, decimals=0))
    else:
      _set_y_limits(axes, [downsample(curve.value) for curve in series])
      axes.yaxis.set_major_locator(_value_ticks())
      axes.yaxis.set_major_formatter(ticker.StrMethodFormatter('{x:g}'))
    return _svg(canvas)


def _draw(axes, curve: Curve) -> None:
  color = PLACEHOLDERS[f's{curve.color}']
  finite = np.where(np.isfinite(curve.value), curve.value, np.nan)
  step, value = downsample(curve.step), downsample(finite)
  marker = {'marker': 'o', 'ms': 5} if curve.points or len(step) < 3 else {}
  average = value if curve.points else smooth(value)
  if np.array_equal(average, value, equal_nan=True):
    axes.plot(step, value, color=color, lw=2, **marker)
  else:
    axes.plot(step, value, color=color, lw=1, alpha=0.3)
    axes.plot(step, average, color=color, lw=2)


def _value_ticks() -> ticker.Locator:
  return ticker.MaxNLocator(4, steps=[1, 2, 2.5, 5, 10])


def _stride(value: np.ndarray) -> int:
  """The number of neighboring values that become one point."""
  return max(1, -(-len(value) // MAX_POINTS))


def downsample(value: np.ndarray) -> np.ndarray:
  """Averages neighboring values, to at most `MAX_POINTS` points."""
  stride = _stride(value)
  parts = [value[i : i + stride] for i in range(0, len(value), stride)]
  return np.array([part.mean() for part in parts])


def smooth(value: np.ndarray) -> np.ndarray:
  """A centered moving average of a noisy curve; other curves unchanged.

  Values that are not finite become NaN. Outliers are clipped to the typical
  range, so that one of them does not shift the average of its neighbors.
  """
  is_finite = np.isfinite(value)
  finite = value[is_finite]
  if finite.size < 24:
    return value
  clipped = np.clip(finite, *_typical_range(finite))
  if np.abs(np.diff(clipped)).mean() < 0.02 * np.ptp(clipped):
    return value
  window = np.ones(finite.size // 12 | 1)
  summands = np.zeros(len(value))
  summands[is_finite] = clipped
  total = np.convolve(summands, window, 'same')
  count = np.convolve(is_finite.astype(float), window, 'same')
  return np.where(is_finite, total / np.maximum(count, 1.0), np.nan)


def _typical_range(value: np.ndarray) -> tuple[float, float]:
  """The range of `value` without spikes of one or two points.

  It is the range of the running median, widened by the 98 % quantile of
  distances from it. A range of a single value becomes (-∞, ∞): values that
  differ from a constant matter.
  """
  windows = np.lib.stride_tricks.sliding_window_view(
    np.pad(value, 2, mode='reflect'), 5
  )
  median = np.median(windows, axis=1)
  margin = np.quantile(np.abs(value - median), 0.98)
  low, high = median.min() - margin, median.max() + margin
  return (low, high) if low < high else (-np.inf, np.inf)


def _set_y_limits(axes, values: Sequence[np.ndarray]) -> None:
  """Limits the y axis where a few spikes would flatten the curves."""
  values = [value[np.isfinite(value)] for value in values]
  ranges = [_typical_range(value) for value in values if value.size >= 24]
  if len(ranges) < len(values):
    return
  low, high = min(r[0] for r in ranges), max(r[1] for r in ranges)
  value = np.concatenate(values)
  margin = (high - low) / 2
  if high < value.max() - margin or value.min() + margin < low:
    low, high = low - margin / 8, high + margin / 8
    axes.set_ylim(max(low, 0) if value.min() >= 0 else low, high)


def stacked(
  step: np.ndarray,
  seconds: Mapping[str, np.ndarray],
  colors: Mapping[str, int],
  *,
  width: int,
  height: int,
) -> str:
  """Draws the seconds of each stage over steps as a stacked area chart."""
  with matplotlib.rc_context(STYLE):
    canvas, axes = _axes(width, height, margin_left=44)
    stride = _stride(step)
    edge = np.append(step[::stride], step[-1] + 1) - 0.5
    base = np.zeros(len(edge) - 1)
    for stage, value in seconds.items():
      top = base + np.nan_to_num(downsample(value))
      axes.stairs(
        top,
        edge,
        baseline=base,
        fill=True,
        color=PLACEHOLDERS[f's{colors[stage]}'],
        lw=0,
      )
      base = top
    axes.set_xlim(edge[0], edge[-1])
    # The first step compiles: it may exceed the chart, to show the others.
    axes.set_ylim(0, min(base.max(), 2 * np.median(base)) * 1.05 or 1)
    axes.xaxis.set_major_locator(ticker.MaxNLocator(6, integer=True))
    axes.yaxis.set_major_locator(_value_ticks())
    axes.yaxis.set_major_formatter(ticker.StrMethodFormatter('{x:g} s'))
    return _svg(canvas)


def gantt(
  records: Sequence[Mapping[str, Any]],
  colors: Mapping[str, int],
  *,
  width: int,
) -> str:
  """Draws when each stage ran, one row per stage and place.

  Args:
    records: records of timeline.jsonl, at least one.
    colors: number of the color of each stage.
    width: pixels.
  """
  several = len({record['place'] for record in records}) > 1
  origin = min(record['start'] for record in records)
  end = max(record['end'] for record in records)
  thinnest = (end - origin) / width  # Seconds of a pixel.
  rows: dict[tuple[str, str], list] = {}
  for record in sorted(records, key=lambda record: record['start']):
    row = rows.setdefault((record['place'], record['stage']), [])
    seconds = max(record['end'] - record['start'], thinnest)
    row.append((record['start'] - origin, seconds))
  if several:
    rows = dict(sorted(rows.items(), key=lambda item: item[0][0]))
  names = [f'{p} · {stage}' if several else stage for p, stage in rows]
  with matplotlib.rc_context(STYLE):
    left = 16 + 7 * max(map(len, names))
    canvas, axes = _axes(width, 54 + 24 * len(rows), margin_left=left, top=22)
    for y, ((_, stage), bars) in enumerate(rows.items()):
      color = PLACEHOLDERS[f's{colors[stage]}']
      axes.broken_barh(bars, (y - 0.36, 0.72), color=color, lw=0)
    for step in sorted({record['step'] for record in records}):
      start = min(r['start'] for r in records if r['step'] == step) - origin
      axes.axvline(start, color=PLACEHOLDERS['soft'], lw=1, ls=(0, (2, 3)))
      axes.text(
        start,
        1.01,
        f' step {step}',
        transform=axes.get_xaxis_transform(),
        va='bottom',
        color=PLACEHOLDERS['soft'],
      )
    axes.grid(False, axis='y')
    axes.set_xlim(0, end - origin or 1)
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
  """The SVG element for a page, whose fonts and colors are the page's."""
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
  for name, color in PLACEHOLDERS.items():
    text = text.replace(color, f'var(--{name})')
  return text
