"""Summary of a run in a few sentences, from its metrics."""

from typing import NamedTuple

import numpy as np

from rlinf_jax.run_files import failures, run_folder


class Headline(NamedTuple):
  """A metric that shows whether a run learned.

  Attributes:
    label: its name in sentences.
    metric: its name in metrics.jsonl.
    is_fraction: whether it lies between 0 and 1, to be shown in percent.
  """

  label: str
  metric: str
  is_fraction: bool


# In order of preference: the first that a run has is its headline.
HEADLINES = (
  Headline('held-out accuracy', 'eval/accuracy', True),
  Headline('held-out success rate', 'eval/success_once', True),
  Headline('held-out return', 'eval/return', False),
  Headline('held-out loss', 'eval/loss', False),
  Headline('accuracy on training prompts', 'rollout/accuracy', True),
  Headline('success rate in training', 'env/success_once', True),
  Headline('return in training', 'env/return', False),
  Headline('mean reward', 'rollout/reward_mean', False),
  Headline('loss', 'train/loss', False),
)
# The returns beside each success rate.
RETURNS = {
  'eval/success_once': 'eval/return',
  'env/success_once': 'env/return',
}
MAX_SETS = 4  # That a sentence names one by one.


def describe(run: run_folder.Run) -> str:
  """Describes progress, time and problems of a run in a few sentences."""
  if run.evaluation:
    return _evaluated(run)
  sentences = [_progress(run)]
  times = run_folder.stage_seconds(run)
  if times:
    name, longest = next(iter(times.items()))
    verb = 'passed' if name in run_folder.NO_STAGE else 'was spent in'
    # Stages of several places overlap, so their sum may exceed the duration.
    fraction = percent(longest / max(run_folder.seconds(run), longest), 0)
    sentences.append(f'Most time {verb} {name} ({fraction}).')
  if run.warm_start:
    sentences.append(
      f'It started from a model that was warmed up in '
      f'{_duration(run.warm_start)}.'
    )
  if not run.result:
    sentences.append(
      'The run is not finished: it is still running, or it stopped after step '
      f'{run_folder.steps(run):,}.'
    )
  sentences += failures.read(run.folder)
  not_finite = {
    name: series.step[~np.isfinite(series.value)]
    for name, series in run.series.items()
  }
  not_finite = {name: steps for name, steps in not_finite.items() if steps.size}
  if not_finite:
    first = min(steps[0] for steps in not_finite.values())
    sentences.append(
      f'From step {first:,} on, some values were NaN or infinite: '
      f'{", ".join(not_finite)}.'
    )
  return ' '.join(sentences)


def _evaluated(run: run_folder.Run) -> str:
  """Describes an evaluation without training."""
  sets = run.evaluation['sets']
  if len(sets) > MAX_SETS and 'all' in sets:  # The others are in the table.
    sets = {'all': sets['all']}
  scores = [
    f'{set_}: {score["value"]:.1%} of {score["problems"]:,}'
    for set_, values in sets.items()
    for score in (values.get('accuracy'), values.get('success_once'))
    if score and 'problems' in score
  ]
  value, unit = duration(run)
  scores = f' {"; ".join(scores)}.' if scores else ''
  return f'Evaluated in {value} {unit}.{scores}'


def _progress(run: run_folder.Run) -> str:
  """Describes how the headline metric changed."""
  best = headline(run)
  if not best:
    return f'The run took {_duration(run)}.'
  if returns := without_success(run):
    return f'No episode succeeded. {_change(run, returns)}'
  return _change(run, best)


def _change(run: run_folder.Run, best: Headline) -> str:
  """Describes how a metric changed."""
  label, name, is_fraction = best
  label = label[0].upper() + label[1:]
  change = first_and_last(run, name)
  if not change:
    (step,) = run.series[name].step[np.isfinite(run.series[name].value)]
    value = number(latest(run, name), is_fraction)
    return f'{label} was {value} at step {step:,}, its only measurement.'
  before, after = change
  small = 0.005 if is_fraction else 0.01 * abs(before)
  if abs(after - before) <= small:
    verb = 'stayed about the same, from'
  else:
    verb = 'rose from' if after > before else 'fell from'
  return (
    f'{label} {verb} {number(before, is_fraction)} to '
    f'{number(after, is_fraction)} in '
    f'{_duration(run)}.'
  )


def _duration(run: run_folder.Run) -> str:
  steps, (value, unit) = run_folder.steps(run), duration(run)
  return f'{steps:,} {"step" if steps == 1 else "steps"} and {value} {unit}'


def headline(run: run_folder.Run) -> Headline | None:
  """The first of `HEADLINES` that a run has, if any."""
  for candidate in HEADLINES:
    series = run.series.get(candidate.metric)
    if series and np.isfinite(series.value).any():
      return candidate
  return None


def without_success(run: run_folder.Run) -> Headline | None:
  """The return, where no episode succeeded; environments may know no success.

  None where some episode did, or where returns do not differ.
  """
  first = headline(run)
  name = RETURNS.get(first.metric) if first else None
  if name not in run.series or np.nanmax(run.series[first.metric].value) > 0:
    return None
  value = run.series[name].value
  if np.nanmax(value) <= np.nanmin(value):
    return None
  return next(x for x in HEADLINES if x.metric == name)


def first_and_last(
  run: run_folder.Run, name: str
) -> tuple[float, float] | None:
  """A metric at the start and at the end of a run.

  Metrics of single steps are noisy: they are averaged over the first and the
  last tenth of the run. Values that are not finite are ignored.

  Returns:
    Both values, or None if the metric has fewer than two.
  """
  value = run.series[name].value
  value = value[np.isfinite(value)]
  if len(value) < 2:
    return None
  n = 1 if name.startswith('eval/') else max(1, len(value) // 10)
  return float(value[:n].mean()), float(value[-n:].mean())


def latest(run: run_folder.Run, name: str) -> float:
  """The last finite value of a metric."""
  value = run.series[name].value
  return float(value[np.isfinite(value)][-1])


def number(value: float, is_fraction: bool = False) -> str:
  """Formats a number; fractions of one in percent."""
  if not np.isfinite(value):
    return 'not a number' if np.isnan(value) else 'infinite'
  if is_fraction:
    return percent(value)
  return f'{value:,.0f}' if abs(value) >= 1000 else f'{value:.3g}'


def percent(value: float, decimals: int = 1) -> str:
  """Formats a fraction of one in percent."""
  return f'{100 * value:.{decimals}f}\N{NARROW NO-BREAK SPACE}%'


def duration(run: run_folder.Run) -> tuple[str, str]:
  """The duration of a run: a number and its unit."""
  seconds = run_folder.seconds(run)
  if seconds < 120:
    return f'{seconds:.0f}', 'seconds'
  return f'{seconds / 60:.1f}', 'minutes'
