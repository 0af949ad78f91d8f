"""Results of a sweep: a CSV file, a table and a plot of means over seeds."""

from collections.abc import Iterable, Mapping, Sequence
import csv
import functools
import itertools
import json
import math
import pathlib
import re
from typing import Any

import numpy as np

from rlinf_jax.config import suggestions
from rlinf_jax.run import console
from rlinf_jax.run_files import run_folder
from rlinf_jax.sweep import grid
from rlinf_jax.system import whole_file

CAPTION = 'last values: mean ± standard deviation over seeds'


def read_result(point: grid.Point) -> dict[str, Any] | None:
  """Reads the result.json of a point; None if the point is not finished."""
  try:
    return json.loads((point.folder / 'result.json').read_text())
  except (FileNotFoundError, json.JSONDecodeError):
    return None


def write_csv(points: Sequence[grid.Point], path: pathlib.Path) -> None:
  """Writes one row per point: values of parameters, result and metrics."""
  rows = []
  for point in points:
    result = read_result(point) or {'metrics': {}}
    rows.append({'point': point.name, **point.values})
    rows[-1] |= {k: v for k, v in result.items() if k != 'metrics'}
    rows[-1] |= dict(sorted(result['metrics'].items()))
  columns = list(dict.fromkeys(name for row in rows for name in row))
  with whole_file.replaced(path) as part, part.open('w', newline='') as file:
    writer = csv.DictWriter(file, columns)
    writer.writeheader()
    writer.writerows(rows)


def score(points: Iterable[grid.Point]) -> str:
  """The metric that summarizes evaluations of these points."""
  logged = {
    x for point in points for x in (read_result(point) or {}).get('metrics', ())
  }
  scores = [metric for metric, _ in console.SCORES.values()]
  return next((name for name in scores if name in logged), scores[0])


def settings(
  points: Sequence[grid.Point],
) -> dict[str, list[grid.Point]]:
  """Groups points that differ only in their seed, by their other values."""
  names = [x for x in points[0].values if not _is_seed(x)]
  labels = dict(
    zip(points[0].values, grid.labels(points[0].values), strict=True)
  )
  groups = {}
  for point in points:
    name = ', '.join(f'{labels[x]}={point.values[x]}' for x in names)
    groups.setdefault(name or 'all', []).append(point)
  return groups


def write(
  points: Sequence[grid.Point], folder: pathlib.Path, metric: str | None
) -> pathlib.Path:
  """Writes the table of points, the table of means and the plot.

  Args:
    points: of the grid; at least one of them has finished.
    folder: of the sweep.
    metric: the metric to compare; None for that of evaluations.

  Returns:
    The path of the plot.

  Raises:
    ValueError: if no finished point logged the metric.
  """
  write_csv(points, folder / 'results.csv')
  metric = metric or score(points)
  groups = settings(points)
  columns, rows = mean_table(groups, metric)
  lines = [columns, ['---'] * len(columns), *rows]
  text = ''.join(f'| {" | ".join(map(_cell, line))} |\n' for line in lines)
  whole_file.write_text(folder / 'results.md', f'{CAPTION}\n\n{text}')
  picture = folder / f'{metric.replace("/", "_")}.png'
  with whole_file.replaced(picture) as part:
    plot(groups, metric, part)
  return picture


def mean_table(
  groups: Mapping[str, Sequence[grid.Point]], metric: str
) -> tuple[list[str], list[list[str]]]:
  """Computes mean and deviation of a metric's last values, and of seconds.

  Returns:
    Names of the columns, and rows of 'mean ± standard deviation', with the
    number of values where some runs that finished have none.
  """
  rows = []
  for name, points in groups.items():
    finished = [x for x in map(read_result, points) if x is not None]
    values = [x['metrics'][metric] for x in finished if metric in x['metrics']]
    seconds = [x['seconds'] for x in finished]
    runs = f'{len(finished)} of {len(points)}'
    value = _mean(values)
    # A run that diverged has no finite value.
    if values and len(values) < len(finished):
      value += f' (of {len(values)})'
    rows.append([name, runs, value, _mean(seconds)])
  return ['setting', 'finished', metric, 'seconds'], rows


def _cell(text: str) -> str:
  """A text as the cell of a table in Markdown."""
  return text.replace('|', r'\|').replace('\n', ' ')


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
  """Prints the table of `mean_table`."""
  from rich import console, table, text

  # As text: brackets in values of parameters would be read as markup.
  printed = table.Table(caption=CAPTION)
  for name in columns:
    printed.add_column(text.Text(name))
  for row in rows:
    printed.add_row(*map(text.Text, row))
  console.Console().print(printed)


def curve(
  points: Iterable[grid.Point], metric: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
  """Averages a metric over points, at the steps that all of them logged.

  Returns:
    Steps, means and standard deviations, which are NaN for a single point.
    None if no finished point logged the metric.
  """
  series = [
    found
    for point in points
    if read_result(point) is not None
    and (found := _series(point.folder.absolute(), metric)) is not None
  ]
  if not series:
    return None
  steps = series[0].step
  for x in series[1:]:
    steps = np.intersect1d(steps, x.step)
  values = np.array([x.value[np.isin(x.step, steps)] for x in series])
  if len(values) < 2:
    return steps, values[0], np.full(steps.shape, np.nan)
  return steps, values.mean(0), values.std(0, ddof=1)


@functools.cache
def _series(folder: pathlib.Path, metric: str) -> run_folder.Series | None:
  """A metric of a finished point, whose files change no more.

  It is read once, although the results are written whenever a point finishes.
  """
  return run_folder.metrics(folder).get(metric)


def plot(
  groups: Mapping[str, Sequence[grid.Point]],
  metric: str,
  path: pathlib.Path,
) -> None:
  """Plots one line per setting: the mean over seeds, in a band of deviation.

  Raises:
    ValueError: if no finished point logged the metric.
  """
  import matplotlib
  from matplotlib import figure

  curves = {name: curve(points, metric) for name, points in groups.items()}
  if not any(curves.values()):
    finished = map(read_result, itertools.chain(*groups.values()))
    logged = sorted(
      {x for result in finished if result for x in result['metrics']}
    )
    raise ValueError(
      f'No finished point logged `{metric}`, so it cannot be plotted'
      f'{suggestions.suggest(metric, logged)}'
    )
  picture = figure.Figure(figsize=(7.5, 4.5), layout='constrained')
  # Settings may be paths with variables: `$A/x` and `$B/y` are no mathematics.
  with matplotlib.rc_context({'text.parse_math': False}):
    _draw(picture, curves, metric)
    picture.savefig(path, dpi=150)


def _draw(picture, curves, metric: str) -> None:
  """Draws the curves of settings, by name; None for one without points."""
  axes = picture.add_subplot(
    xlabel='updates',
    ylabel=metric,
    title='mean and standard deviation over seeds',
  )
  for i, (name, found) in enumerate(curves.items()):
    if found is None:
      continue
    steps, mean, spread = found
    color, style = f'C{i % 10}', ('-', '--', ':', '-.')[i // 10 % 4]
    axes.plot(steps, mean, style, marker='.', color=color, label=name)
    axes.fill_between(
      steps, mean - spread, mean + spread, color=color, alpha=0.2, linewidth=0
    )
  axes.xaxis.get_major_locator().set_params(integer=True)
  axes.legend()


def _is_seed(name: str) -> bool:
  return re.split('[./]', name)[-1].lower() == 'seed'


def _mean(values: Sequence[float | str]) -> str:
  if not values:
    return ''
  x = np.array(values, float)
  peak = np.abs(x).max()
  digits = 3 if peak < 100 else 0
  if 0 < peak < 0.1:
    digits = 2 - math.floor(math.log10(peak))
  if len(x) < 2:
    return f'{x[0]:.{digits}f}'
  return f'{x.mean():.{digits}f} ± {x.std(ddof=1):.{digits}f}'
