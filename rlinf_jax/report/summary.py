"""What happened in a run, in words computed from its numbers."""

import numpy as np

from rlinf_jax.run import run_folder

# What tells best whether a run learned: its words, its metric, whether it is
# a share of one. The first that a run has is its headline.
HEADLINES = (
  ('held-out accuracy', 'eval/accuracy', True),
  ('held-out success', 'eval/success_once', True),
  ('accuracy on training prompts', 'rollout/accuracy', True),
  ('success in training', 'env/success_once', True),
  ('mean reward', 'rollout/reward_mean', False),
  ('loss', 'train/loss', False),
)


def tell(run: run_folder.Run) -> str:
  """What happened, in a few sentences."""
  sentences = [_progress(run)]
  times = run_folder.stage_seconds(run)
  if times:
    place, most = next(iter(times.items()))
    passed = 'passed' if place in run_folder.NO_STAGE else 'went to'
    share = percent(most / sum(times.values()), 0)
    sentences.append(f'Most time {passed} {place} ({share}).')
  if run.warm_start:
    sentences.append(
      f'It started from a model warmed up in {_effort(run.warm_start)}.'
    )
  if not run.result:
    sentences.append(
      'The run is unfinished: it still runs, or it stopped after step '
      f'{run_folder.steps(run):,}.'
    )
  broken = {
    name: series.step[~np.isfinite(series.value)]
    for name, series in run.series.items()
  }
  broken = {name: at for name, at in broken.items() if at.size}
  if broken:
    first = min(at[0] for at in broken.values())
    sentences.append(
      f'From step {first:,} on, not every value was a finite number: '
      f'{", ".join(broken)}.'
    )
  return ' '.join(sentences)


def _progress(run: run_folder.Run) -> str:
  best = headline(run)
  if not best:
    return f'The run made {_effort(run)}.'
  words, name, share = best
  words = words[0].upper() + words[1:]
  change = ends(run, name)
  if not change:
    (step,) = run.series[name].step[np.isfinite(run.series[name].value)]
    value = number(latest(run, name), share)
    return f'{words} was {value} at step {step:,}, its only measurement.'
  before, after = change
  small = 0.005 if share else 0.01 * abs(before)
  if abs(after - before) <= small:
    verb = 'stayed about the same, from'
  else:
    verb = 'rose from' if after > before else 'fell from'
  return (
    f'{words} {verb} {number(before, share)} to {number(after, share)} in '
    f'{_effort(run)}.'
  )


def _effort(run: run_folder.Run) -> str:
  steps, (value, unit) = run_folder.steps(run), duration(run)
  return f'{steps:,} {"step" if steps == 1 else "steps"} and {value} {unit}'


def headline(run: run_folder.Run) -> tuple[str, str, bool] | None:
  """The line of `HEADLINES` that a run is best told by, if any."""
  for line in HEADLINES:
    series = run.series.get(line[1])
    if series and np.isfinite(series.value).any():
      return line
  return None


def ends(run: run_folder.Run, name: str) -> tuple[float, float] | None:
  """A metric before and after; None where it was measured once.

  Evaluations are taken as they are, noisy metrics as means of their outer
  tenths. Numbers that are not finite do not count.
  """
  value = run.series[name].value
  value = value[np.isfinite(value)]
  if len(value) < 2:
    return None
  few = 1 if name.startswith('eval/') else max(1, len(value) // 10)
  return float(value[:few].mean()), float(value[-few:].mean())


def latest(run: run_folder.Run, name: str) -> float:
  """The last finite value of a metric."""
  value = run.series[name].value
  return float(value[np.isfinite(value)][-1])


# Numbers as words.


def number(value: float, share: bool = False) -> str:
  if not np.isfinite(value):
    return 'not a number' if np.isnan(value) else 'infinite'
  if share:
    return percent(value)
  return f'{value:,.0f}' if abs(value) >= 1000 else f'{value:.3g}'


def percent(value: float, decimals: int = 1) -> str:
  return f'{100 * value:.{decimals}f}\N{NARROW NO-BREAK SPACE}%'


def duration(run: run_folder.Run) -> tuple[str, str]:
  """How long a run took: a number and its unit."""
  seconds = run_folder.seconds(run)
  if seconds < 120:
    return f'{seconds:.0f}', 'seconds'
  return f'{seconds / 60:.1f}', 'minutes'
