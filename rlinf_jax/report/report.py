"""One page that says what happened in a run: `report.html`.

  python -m rlinf_jax.report runs/x

The page needs nothing but itself: no network, no script. It is made from what
the run folder holds, so a run that crashed, or still runs, has a page too.
"""

import argparse
from collections.abc import Mapping, Sequence
import html
import os
import pathlib
import re
import sys

import numpy as np

from rlinf_jax.report import charts, page, predicted, samples_html, summary
from rlinf_jax.run import run_folder

# Curves in the order of the page: title, what it means, its metrics by label.
CURVES = (
  ('Reward', 'mean of a step', {'': 'rollout/reward_mean'}),
  (
    'Success',
    'of the episodes that ended',
    {'at some moment': 'env/success_once', 'at the end': 'env/success_at_end'},
  ),
  ('Return', 'of the episodes that ended', {'': 'env/return'}),
  ('Episode length', 'steps', {'': 'env/episode_length'}),
  ('Loss', 'what the updates make smaller', {'': 'train/loss'}),
  (
    'Policy loss',
    'a surrogate: near zero is normal',
    {'': 'train/policy_loss'},
  ),
  ('Value loss', 'how far the critic is off', {'': 'train/value_loss'}),
  (
    'Explained variance',
    'of returns, by the critic',
    {'': 'train/explained_variance'},
  ),
  ('Expected', 'of what was done, by the critics', {'': 'train/q_value'}),
  ('Entropy', 'nats a token or action', {'': 'train/entropy'}),
  ('Temperature', 'what a nat of entropy is worth', {'': 'train/temperature'}),
  (
    'KL divergence',
    'nats a token or action',
    {
      'from the sampler': 'train/kl_behavior',
      'from the reference': 'train/kl_reference',
    },
  ),
  (
    'Clipped',
    'tokens or actions outside the trust region',
    {'': 'train/clip_fraction'},
  ),
  (
    'Response length',
    'tokens',
    {
      'mean': 'rollout/response_length_mean',
      'longest': 'rollout/response_length_max',
    },
  ),
  (
    'Truncated',
    'completions cut at the limit',
    {'': 'rollout/truncated_fraction'},
  ),
  (
    'Silent groups',
    'same reward throughout',
    {'': 'rollout/groups_degenerate'},
  ),
  ('Gradient norm', 'before clipping', {'': 'train/grad_norm'}),
  ('Learning rate', '', {'': 'train/lr', 'critic': 'train/lr_critic'}),
  (
    'Waiting',
    'share of a rollout in simulators',
    {'simulators': 'wait/simulators', 'policy': 'wait/policy'},
  ),
  ('Speed', 'tokens a second', {'': 'throughput/tokens_per_second'}),
  ('Speed', 'environment steps a second', {'': 'throughput/steps_per_second'}),
)
SPEEDS = {
  'throughput/tokens_per_second': 'tokens a second',
  'throughput/steps_per_second': 'environment steps a second',
}
# What a headline is shown with: what was measured while it trained.
BESIDE = {
  'eval/accuracy': ('rollout/accuracy', 'training prompts, sampled'),
  'eval/success_once': ('env/success_once', 'in training, drawn'),
}
GANTT_STEPS = 4
THIRD, TWO_THIRDS, WHOLE = 325, 703, 1082  # Pixels inside a card.


def write(folder: str | os.PathLike) -> pathlib.Path:
  """Writes `report.html` into a run folder; returns its path.

  Raises:
    FileNotFoundError: the folder has no metrics.
    ValueError: one of its files is broken in the middle.
  """
  run = run_folder.read(folder)
  text = page.render(
    'report_template.html',
    name=html.escape(run.folder.resolve().name),
    kind=html.escape(_kind(run)),
    state='finished' if run.result else 'unfinished',
    story=html.escape(summary.tell(run)),
    figures=_figures(run),
    headline=_headline_cards(run),
    curves=_curve_cards(run),
    time=_time_cards(run),
    samples=samples_html.videos(run) + samples_html.samples(run),
    details=_details(run),
  )
  path = run.folder / 'report.html'
  partial = path.with_name('report.html.tmp')
  partial.write_text(text, encoding='utf-8')
  return partial.replace(path)


def try_write(folder: str | os.PathLike) -> str:
  """Writes the report; returns its path, or a sentence why there is none."""
  try:
    return str(write(folder))
  except Exception as error:  # noqa: BLE001 The model is worth more than its page.
    return f'none, because: {error} Again: python -m rlinf_jax.report {folder}'


def _kind(run: run_folder.Run) -> str:
  """The workflow that the configuration names, as `grpo`; else nothing."""
  path = run.folder / 'config.gin'
  text = path.read_text(encoding='utf-8') if path.exists() else ''
  found = re.search(r'^\S*train\.workflow\s*=\s*@([\w./]+)', text, re.MULTILINE)
  return re.split(r'[./]', found[1])[-1] if found else ''


def _figures(run: run_folder.Run) -> str:
  """The big numbers on top."""
  figures = []
  if headline := summary.headline(run):
    words, name, share = headline
    change = summary.ends(run, name) or [summary.latest(run, name)]
    value = '<i>→</i>'.join(
      f'<b>{summary.number(x, share)}</b>' for x in change
    )
    figures.append((words, value, 'headline'))
  figures.append(('steps', f'<b>{run_folder.steps(run):,}</b>', ''))
  value, unit = summary.duration(run)
  figures.append((unit, f'<b>{value}</b>', ''))
  for name, words in SPEEDS.items():
    if speeds := run.series.get(name):
      speed = np.median(speeds.value)
      figures.append((words, f'<b>{speed:,.0f}</b>', ''))
  return page.figures(figures)


def _headline_cards(run: run_folder.Run) -> str:
  """The curve that matters most, beside that of the warm-up."""
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
  words, name, share = headline
  colors, lines = {}, []
  beside, label = BESIDE.get(name, ('', ''))
  if beside in run.series:
    colors = {'held out, greedy': 1, label: 2}
    lines = [charts.Line(*run.series[beside], 2)]
  exact = name.startswith('eval/')
  change = summary.ends(run, name)
  lines.append(charts.Line(*run.series[name], 1, points=exact))
  title = f'{prefix}{words}'
  return page.card(
    title[0].upper() + title[1:],
    page.legend(colors) or 'over steps',
    charts.curves(
      lines,
      width=width,
      height=260,
      percent=share,
      base=change[0] if exact and change else None,
    ),
    summary.number(summary.latest(run, name), share),
    size,
  )


def _curve_cards(run: run_folder.Run) -> str:
  """A small curve for each metric that the run has, but its headline."""
  cards = []
  _, shown, _ = summary.headline(run) or ('', '', False)
  for title, note, names in CURVES:
    found = {
      label: run.series[name]
      for label, name in names.items()
      if name in run.series
      and name != shown
      and np.isfinite(run.series[name].value).any()
    }
    if not found:
      continue
    colors = {label: i for i, label in enumerate(found, 1) if label}
    lines = [charts.Line(*s, i) for i, s in enumerate(found.values(), 1)]
    last = next(iter(found.values())).value[-1]
    picture = charts.curves(lines[::-1], width=THIRD, height=150)
    note = ' '.join([note, page.legend(colors)])
    cards.append(page.card(title, note, picture, summary.number(last), 'third'))
  if not cards:
    return ''
  return f'<h2>Step by step</h2><div class="grid">{"".join(cards)}</div>'


def _time_cards(run: run_folder.Run) -> str:
  """Where the time went: shares, seconds over steps, the last steps."""
  times = run_folder.stage_seconds(run)
  if not times:
    return ''
  ran = {record['stage'] for record in run.runs}
  names = [*times, *sorted(ran - set(times))]
  colors = dict.fromkeys(names, charts.SERIES)
  places = (name for name in names if name not in run_folder.NO_STAGE)
  colors |= dict(zip(places, range(1, charts.SERIES), strict=False))
  cards = [_share_card(times, colors)]
  stages = {
    name: run.series[f'time/{name}']
    for name in times
    if f'time/{name}' in run.series and name != 'evaluate'
  }
  if stages:
    cards.append(_stacked_card(stages, colors))
  if run.runs:
    cards.append(_gantt_card(run.runs, colors))
  if lines := predicted.table(run.folder):
    cards.append(_predicted_card(lines))
  grid = ''.join(cards)
  return f'<h2>Where the time went</h2><div class="grid">{grid}</div>'


def _share_card(times: Mapping[str, float], colors: Mapping[str, int]) -> str:
  total = sum(times.values())
  rows = []
  for name, value in times.items():
    style = f'width: {100 * value / total:.2f}%; --c: var(--s{colors[name]})'
    rows.append(
      f'<tr><td>{page.key(name, colors[name])}</td>'
      f'<td>{summary.percent(value / total)}</td><td>{value:,.1f} s</td></tr>'
      f'<tr class="bar"><td colspan="3"><div style="{style}"></div></td></tr>'
    )
  table = f'<table>{"".join(rows)}</table>'
  return page.card('Shares', 'of all seconds', table, '', 'third')


def _stacked_card(stages, colors: Mapping[str, int]) -> str:
  step = np.unique(np.concatenate([s.step for s in stages.values()]))
  seconds = {name: np.zeros(len(step)) for name in stages}
  for name, series in stages.items():
    seconds[name][np.searchsorted(step, series.step)] = series.value
  of_step = sum(np.nan_to_num(value) for value in seconds.values())
  note = 'over steps, stage on stage'
  if len(step) > 2 and of_step[0] > 2 * np.median(of_step):
    note += f'; the first took {of_step[0]:.1f} s, as it compiles'
  picture = charts.stacked(step, seconds, colors, width=TWO_THIRDS, height=280)
  now = f'{np.median(of_step):.2f} s'
  return page.card('Seconds a step', note, picture, now, 'two-thirds')


def _gantt_card(runs: Sequence[Mapping], colors: Mapping[str, int]) -> str:
  last = sorted({record['step'] for record in runs})[-GANTT_STEPS:]
  records = [record for record in runs if record['step'] in last]
  picture = charts.gantt(records, colors, width=WHOLE)
  words = 'step' if len(last) == 1 else f'{len(last)} steps'
  return page.card(
    f'The last {words}', 'which stage ran when', picture, '', 'whole'
  )


def _predicted_card(lines: Sequence[predicted.Row]) -> str:
  rows = ''.join(
    f'<tr><td>{html.escape(line.name)}</td><td>{line.predicted:.3g} s</td>'
    f'<td>{"" if line.measured is None else f"{line.measured:.3g} s"}</td>'
    f'<td>{"" if line.ratio is None else f"{line.ratio:.2f}"}</td>'
    f'<td>{line.source}</td></tr>'
    for line in lines
  )
  table = (
    '<table><tr><th></th><th>predicted</th><th>measured</th><th>ratio</th>'
    f'<th>by what was</th></tr>{rows}</table>'
  )
  note = 'seconds a step: the plan in simulation, and the median since'
  return page.card('Predicted against measured', note, table, '', 'whole')


def _details(run: run_folder.Run) -> str:
  """All metrics in numbers, and the configuration."""
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
  parser = argparse.ArgumentParser(
    prog='python -m rlinf_jax.report',
    description='Writes report.html into a run folder.',
  )
  parser.add_argument('folder', help='a run folder, the --workdir of a run')
  try:
    print(write(parser.parse_args().folder))
  except (OSError, ValueError) as error:
    sys.exit(str(error))
