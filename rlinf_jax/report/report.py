"""Writes `report.html`: one self-contained page about a run.

  python -m rlinf_jax.report runs/x
  python -m rlinf_jax.report runs/x runs/y  # Compares them, in compare.html.

The page is made from the files of the run folder, also of a run that crashed or
is still running. It loads nothing and runs no scripts.
"""

import argparse
from collections.abc import Mapping, Sequence
import html
import os
import pathlib
import re

import numpy as np

from rlinf_jax import command_line
from rlinf_jax.config import config, config_errors
from rlinf_jax.report import by_set, compare, predicted, summary
from rlinf_jax.report.html import (
  charts,
  curves,
  evaluation_table,
  page,
  samples_html,
)
from rlinf_jax.run_files import run_folder
from rlinf_jax.system import whole_file

THROUGHPUT = {
  'throughput/tokens_per_second': 'tokens per second',
  'throughput/steps_per_second': 'environment steps per second',
}
# The metric of training that is drawn with a headline, and its label.
TRAINING_COUNTERPARTS = {
  'eval/accuracy': ('rollout/accuracy', 'training prompts, sampled'),
  'eval/success_once': ('env/success_once', 'training, sampled'),
  'eval/return': ('env/return', 'training, sampled'),
  'eval/loss': ('train/loss', 'training'),
}
LEAST_SHARE = 0.01  # Of a step: predictions of shorter stages are left out.
MAX_SHARES = 8  # Rows of the table of shares; other stages are summed.
THIRD, TWO_THIRDS, WHOLE = 325, 703, 1082  # Pixels inside of cards.


def write(folder: str | os.PathLike) -> pathlib.Path:
  """Writes `report.html` into a run folder; returns its path.

  Raises:
    FileNotFoundError: if the folder has no metrics.
    ValueError: if a line of one of its files is not JSON.
  """
  run = run_folder.read(folder)
  text = page.render(
    'report_template.html',
    name=html.escape(run.folder.resolve().name),
    kind=html.escape(_workflow(run)),
    state='finished' if run.result or run.evaluation else 'unfinished',
    summary=html.escape(summary.describe(run)),
    figures=_key_figures(run),
    headline=_headline(run),
    curves=_curve_cards(run),
    time=_time_cards(run),
    samples=samples_html.videos(run) + samples_html.samples(run),
    details=_details(run),
  )
  path = run.folder / 'report.html'
  whole_file.write_text(path, text)
  return path


def try_write(folder: str | os.PathLike) -> str:
  """Writes the report; returns its path, or the reason why there is none."""
  try:
    return str(write(folder))
  except Exception as error:  # noqa: BLE001 Training is worth more than its report.
    return f'none: {error} Try again: python -m rlinf_jax.report {folder}'


def _workflow(run: run_folder.Run) -> str:
  """The name of the workflow in config.gin, such as 'grpo'; '' if unknown."""
  path = run.folder / 'config.gin'
  text = ''
  if path.exists():
    text = path.read_text(encoding='utf-8', errors='replace')
  scope = re.match(f'{config.SCOPE} (.+)', text)
  start = f'{re.escape(scope[1])}/' if scope else ''
  match = re.search(
    rf'^{start}\S*train\.workflow\s*=\s*@([\w./]+)', text, re.MULTILINE
  )
  return re.split(r'[./]', match[1])[-1] if match else ''


def _key_figures(run: run_folder.Run) -> str:
  """The large numbers at the top."""
  figures = []
  for headline in (summary.headline(run), summary.without_success(run)):
    if headline is None:
      continue
    label, name, is_fraction = headline
    values = summary.first_and_last(run, name) or [summary.latest(run, name)]
    text = '<i>→</i>'.join(
      f'<b>{summary.number(x, is_fraction)}</b>' for x in values
    )
    figures.append((label, text, 'headline'))
  if not run.evaluation:
    figures.append(('steps', f'<b>{run_folder.steps(run):,}</b>', ''))
  value, unit = summary.duration(run)
  figures.append((unit, f'<b>{value}</b>', ''))
  for name, label in THROUGHPUT.items():
    if series := run.series.get(name):
      median = np.median(series.value)
      figures.append((label, f'<b>{median:,.0f}</b>', ''))
  return page.key_figures(figures)


def _headline(run: run_folder.Run) -> str:
  """The cards of scores on held-out problems."""
  if run.evaluation:
    return _evaluation_card(run)
  return _headline_cards(run) + _set_card(run) + _evaluation_card(run)


def _evaluation_card(run: run_folder.Run) -> str:
  """The table of an evaluation, in training the newest; '' of none."""
  newest = run_folder.newest_evaluation(run)
  if not newest:
    return ''
  title = f'Evaluation{newest.after}'
  return evaluation_table.card(title, newest.content['sets'])


def _headline_cards(run: run_folder.Run) -> str:
  """The curve of the headline metric, beside that of the warm-up."""
  cards = []
  if run.warm_start:
    cards.append(_headline_card(run.warm_start, 'Warm-up: ', THIRD, 'third'))
  if cards and cards[0]:
    cards.append(_headline_card(run, '', TWO_THIRDS, 'two-thirds'))
  else:
    cards.append(_headline_card(run, '', WHOLE, 'whole'))
  return ''.join(cards)


def _headline_card(
  run: run_folder.Run, prefix: str, width: int, size: str
) -> str:
  headline = summary.headline(run)
  if not headline:
    return ''
  headline_label, name, is_fraction = headline
  colors, lines = {}, []
  counterpart, label = TRAINING_COUNTERPARTS.get(name, ('', ''))
  if counterpart in run.series:
    how = ', sampled' if curves.of_samples(run.series) else ', greedy'
    how = '' if name == 'eval/loss' else how
    colors = {f'held out{how}': 1, label: 2}
    lines = [charts.Curve(*run.series[counterpart], 2)]
  is_evaluation = name.startswith('eval/')
  change = summary.first_and_last(run, name)
  lines.append(charts.Curve(*run.series[name], 1, points=is_evaluation))
  title = f'{prefix}{headline_label}'
  return page.card(
    title[0].upper() + title[1:],
    page.legend(colors) or 'over steps',
    charts.curves(
      lines,
      width=width,
      height=260,
      percent=is_fraction,
      base=change[0] if is_evaluation and change else None,
    ),
    summary.number(summary.latest(run, name), is_fraction),
    size,
  )


def _set_card(run: run_folder.Run) -> str:
  """The first and last score of each held-out set or task; '' of one."""
  rows = []
  for metric, name in by_set.names(run.series).items():
    first_and_last = run.series[metric].value[[0, -1]]
    rows.append([name, *(summary.number(x, True) for x in first_and_last)])
  if not rows:
    return ''
  table = evaluation_table.as_html([['', 'first', 'last'], *rows])
  return page.card(
    'By set or task', 'score on held-out problems', table, '', 'whole'
  )


def _curve_cards(run: run_folder.Run) -> str:
  """A small chart for each metric of training except the headline."""
  if run.evaluation:  # Its one number of each metric is in the table.
    return ''
  cards = []
  headline = summary.headline(run)
  shown = headline.metric if headline else ''
  several = curves.of_samples(run.series)
  samples = 'Several samples', 'of held-out problems', several
  for title, note, names in (*curves.CURVES, samples):
    series = {
      label: run.series[name]
      for label, name in names.items()
      if name in run.series
      and name != shown
      and np.isfinite(run.series[name].value).any()
    }
    if not series:
      continue
    colors = {label: i for i, label in enumerate(series, 1) if label}
    lines = [
      charts.Curve(*s, i, points=names[label].startswith('eval/'))
      for i, (label, s) in enumerate(series.items(), 1)
    ]
    last = next(iter(series.values())).value[-1]
    picture = charts.curves(lines[::-1], width=THIRD, height=150)
    note = ' '.join([note, page.legend(colors)])
    cards.append(page.card(title, note, picture, summary.number(last), 'third'))
  if not cards:
    return ''
  return f'<h2>Metrics</h2><div class="grid">{"".join(cards)}</div>'


def _time_cards(run: run_folder.Run) -> str:
  """Time: share of each stage, seconds over steps, the last steps."""
  times = run_folder.stage_seconds(run)
  if not times:
    return ''
  names = [*times, *sorted(run.timeline.stages - set(times))]
  colors = dict.fromkeys(names, charts.SERIES)
  stage_names = (name for name in names if name not in run_folder.NO_STAGE)
  colors |= dict(zip(stage_names, range(1, charts.SERIES), strict=False))
  cards = [_share_card(times, run_folder.seconds(run), colors)]
  stages = {
    name: run.series[f'time/{name}']
    for name in times
    if f'time/{name}' in run.series and name != 'evaluate'
  }
  if stages:
    cards.append(_stacked_card(run, stages, colors))
  if run.timeline.last:
    cards.append(_gantt_card(run.timeline.last, colors))
  if rows := predicted.table(run.folder):
    cards.append(_predicted_card(rows))
  grid = ''.join(cards)
  return f'<h2>Time</h2><div class="grid">{grid}</div>'


def _share_card(
  times: Mapping[str, float], seconds: float, colors: Mapping[str, int]
) -> str:
  """The share of each stage in the seconds of the run.

  Stages of several places overlap: their shares may add up to more than one.
  """
  total, together = max(seconds, *times.values()), sum(times.values())
  shown = dict(list(times.items())[:MAX_SHARES])
  if others := len(times) - len(shown):
    name = f'{others} other{"s" * (others > 1)}'
    shown[name] = together - sum(shown.values())
  rows = []
  for name, value in shown.items():
    color = colors.get(name, charts.SERIES)
    style = f'width: {100 * value / total:.2f}%; --c: var(--s{color})'
    rows.append(
      f'<tr><td>{page.legend_entry(name, color)}</td>'
      f'<td>{summary.percent(value / total)}</td><td>{value:,.1f} s</td></tr>'
      f'<tr class="bar"><td colspan="3"><div style="{style}"></div></td></tr>'
    )
  table = f'<table>{"".join(rows)}</table>'
  note = 'of the whole run'
  if together > 1.01 * total:
    note += '; stages of different places overlap'
  return page.card('Time by stage', note, table, '', 'third')


def _stacked_card(
  run: run_folder.Run, stages, colors: Mapping[str, int]
) -> str:
  step = np.unique(np.concatenate([s.step for s in stages.values()]))
  seconds = {name: np.zeros(len(step)) for name in stages}
  for name, series in stages.items():
    seconds[name][np.searchsorted(step, series.step)] = series.value
  if 'time/step' in run.series:
    total = run.series['time/step'].value
  else:
    total = sum(np.nan_to_num(value) for value in seconds.values())
  note = 'of every step, stacked by stage'
  if len(step) > 2 and total[0] > 2 * np.median(total):
    note += f'; the first step compiles and took {total[0]:.1f} s'
  picture = charts.stacked(step, seconds, colors, width=TWO_THIRDS, height=280)
  median = f'{np.median(total):.2f} s'
  return page.card('Seconds per step', note, picture, median, 'two-thirds')


def _gantt_card(records: Sequence[Mapping], colors: Mapping[str, int]) -> str:
  picture = charts.gantt(records, colors, width=WHOLE)
  count = len({record['step'] for record in records})
  steps = 'step' if count == 1 else f'{count} steps'
  return page.card(
    f'The last {steps}', 'when each stage ran', picture, '', 'whole'
  )


def _predicted_card(rows: Sequence[predicted.Row]) -> str:
  step, *stages = rows
  least = LEAST_SHARE * max(step.predicted, step.measured or 0.0)
  rows = [step] + [
    x for x in stages if max(x.predicted, x.measured or 0.0) >= least
  ]
  body = ''.join(
    f'<tr><td>{html.escape(row.name)}</td><td>{row.predicted:.3g} s</td>'
    f'<td>{"" if row.measured is None else f"{row.measured:.3g} s"}</td>'
    f'<td>{"" if row.ratio is None else f"{row.ratio:.2f}"}</td>'
    f'<td>{html.escape(row.source)}</td></tr>'
    for row in rows
  )
  table = (
    '<table><tr><th></th><th>predicted</th><th>measured</th><th>ratio</th>'
    f'<th>prediction from</th></tr>{body}</table>'
  )
  note = (
    'seconds per step: simulated, and the median of later steps; stages of '
    f'{LEAST_SHARE:.0%} of a step or more'
  )
  return page.card('Predicted and measured time', note, table, '', 'whole')


def _details(run: run_folder.Run) -> str:
  """Tables of all metrics, and the configuration files."""
  rows = ''.join(
    f'<tr><td>{html.escape(name)}</td>'
    + ''.join(
      f'<td>{summary.number(value)}</td>'
      for value in (s.value[0], s.value[-1], s.value.min(), s.value.max())
    )
    + '</tr>'
    for name, s in sorted(run.series.items())
  )
  blocks = [
    (
      'All metrics',
      '<table><tr><th>metric</th><th>first</th><th>last</th><th>lowest</th>'
      f'<th>highest</th></tr>{rows}</table>',
    )
  ]
  for name in ('config.gin', 'operative_config.gin', 'plan.json'):
    path = run.folder / name
    if path.exists():
      text = path.read_text(encoding='utf-8', errors='replace')
      blocks.append((name, f'<pre>{html.escape(text[:100_000])}</pre>'))
  return ''.join(
    f'<details class="card"><summary>{name}</summary>{body}</details>'
    for name, body in blocks
  )


def main() -> None:
  """Runs the command line."""
  parser = argparse.ArgumentParser(
    prog='python -m rlinf_jax.report',
    description='Writes report.html into a run folder, or compares runs.',
  )
  parser.add_argument(
    'folders', nargs='+', help='run folders, the --workdir of a run each'
  )
  parser.add_argument(
    '--output',
    help='the page that compares runs; compare.html in this folder by default',
  )
  given = parser.parse_args()
  if given.output and len(given.folders) == 1:
    parser.error('--output is the page that compares runs: name another run.')
  try:
    if len(given.folders) == 1:
      print(write(given.folders[0]))
    else:
      print(compare.write(given.folders, given.output or 'compare.html'))
  except command_line.USER_ERRORS as error:
    command_line.refuse(config_errors.text(error))
