"""What a person sees while it trains: one line a step.

On a terminal the lines scroll above a progress bar. Anywhere else (a file, a
pipe) they are plain text, nothing more.
"""

from collections.abc import Callable, Mapping
import os
import pathlib
import sys
from typing import NamedTuple, TextIO

from rlinf_jax.report import predicted
from rlinf_jax.run import writers

# What the line of a step and that of an evaluation show, in order; a field
# that misses a metric is left out.
STEP = (
  'reward {rollout/reward_mean:.2f}',
  'accuracy {rollout/accuracy:.2f}',
  'success {env/success_once:.2f}',
  'loss {train/loss:.3f}',
  'length {rollout/response_length_mean:.1f}/{rollout/response_length_max:.0f}',
  '{throughput/tokens_per_second:,.0f} tok/s',
  '{throughput/steps_per_second:,.0f} moves/s',
  'waits: simulators {wait/simulators:.0%} policy {wait/policy:.0%}',
)
EVALUATION = (
  'accuracy {eval/accuracy:.1%}',
  'success {eval/success_once:.1%}',
  'at the end {eval/success_at_end:.1%}',
  'reward {eval/reward:.2f}',
  'return {eval/return:.2f}',
  'length {eval/response_length_mean:.1f}/{eval/response_length_max:.0f}',
  'length {eval/episode_length:.1f}',
)
# What evaluations are summed up by.
SCORES = {'accuracy': 'eval/accuracy', 'success': 'eval/success_once'}


class Console(NamedTuple):
  """A writer that a person reads.

  Attributes:
    write: `step, values -> None`, one line; an evaluation stands out.
    close: takes the progress bar away; harmless when called again.
    say: `text -> None`, prints lines of its own above the bar.
  """

  write: Callable[[int, Mapping[str, float]], None]
  close: Callable[[], None]
  say: Callable[[str], None]


def view(steps: int, start: int = 0, stream: TextIO | None = None) -> Console:
  """Starts showing a run.

  Args:
    steps: how many updates the whole run has.
    start: how many of them were finished before, for a resumed run.
    stream: where to print; standard output if not given.
  """
  stream = sys.stdout if stream is None else stream
  if stream.isatty():
    return _terminal(steps, start, stream)
  return _plain(steps, stream)


def _plain(steps: int, stream: TextIO) -> Console:
  def say(text: str) -> None:
    print(text, file=stream, flush=True)

  def write(step: int, values: Mapping[str, float]) -> None:
    text = line(step, steps, values)
    say(f'--- {text} ---' if _is_evaluation(values) else text)

  return Console(write, lambda: None, say)


def _terminal(steps: int, start: int, stream: TextIO) -> Console:
  # Imported here: a tenth of a second that a job without a terminal saves.
  import rich.console
  import rich.progress
  import rich.text

  bar = rich.progress.Progress(
    rich.progress.TextColumn('training'),
    rich.progress.BarColumn(bar_width=None),
    rich.progress.MofNCompleteColumn(),
    rich.progress.TimeElapsedColumn(),
    rich.progress.TextColumn('left'),
    rich.progress.TimeRemainingColumn(),
    console=rich.console.Console(file=stream),
    # Slow on purpose: the bar's thread shares the cores with the training.
    refresh_per_second=2,
    transient=True,
    expand=True,
  )
  task = bar.add_task('training', total=steps, completed=start)
  bar.start()

  def say(text: str) -> None:
    bar.console.print(rich.text.Text(text), soft_wrap=True)

  def write(step: int, values: Mapping[str, float]) -> None:
    text = rich.text.Text(line(step, steps, values), overflow='ellipsis')
    if _is_evaluation(values):
      text.stylize('bold green')
    else:
      text.highlight_regex(r'[a-z/_]+', 'dim')
    bar.console.print(text, no_wrap=True)
    bar.update(task, completed=step)

  return Console(write, bar.stop, say)


def _is_evaluation(values: Mapping[str, float]) -> bool:
  return any(name.startswith('eval/') for name in values)


def line(step: int, steps: int, values: Mapping[str, float]) -> str:
  """One step, or one evaluation, in one line; what is missing is left out."""
  parts = [f'step {step:{len(str(steps))}}/{steps}']
  fields = STEP
  if _is_evaluation(values):
    parts.insert(0, 'evaluation')
    fields = EVALUATION
  for field in fields:
    try:
      parts.append(field.format_map(values))
    except KeyError:
      continue
  return '  '.join([*parts, *_seconds(values)])


def _seconds(values: Mapping[str, float]) -> list[str]:
  """Seconds by stage in one piece, biggest first; none without any."""
  seconds = {
    name.removeprefix('time/'): value
    for name, value in values.items()
    if name.startswith('time/') and name != 'time/step'
  }
  biggest = sorted(seconds.items(), key=lambda item: item[1], reverse=True)
  text = ' '.join(f'{name} {value:.2f}s' for name, value in biggest)
  return [text] if text else []


def header(title: str, facts: Mapping[str, str]) -> str:
  """What runs and where, for `say`: a title, then one fact a line."""
  width = max((len(name) for name in facts), default=0)
  rows = [f'  {name:{width}}  {fact}' for name, fact in facts.items()]
  return '\n'.join([title, *rows])


def summary(
  folder: str | os.PathLike, seconds: float, report: str | os.PathLike
) -> str:
  """What came of a run, for `say`, from the metrics in its folder.

  Args:
    folder: the run folder.
    seconds: how long the run took.
    report: the path of the report, or why there is none.
  """
  metrics = pathlib.Path(folder) / 'metrics.jsonl'
  lines = list(writers.records(metrics)) if metrics.exists() else []
  step = max((values['step'] for values in lines), default=0)
  facts = {}
  for name, score in SCORES.items():
    if found := [float(values[score]) for values in lines if score in values]:
      facts[name] = f'{found[0]:.1%} -> {found[-1]:.1%} held out'
  facts['time'] = f'{seconds / 60:.1f} minutes'
  if said := predicted.in_words(folder):
    facts['predicted'] = said
  facts['folder'] = str(folder)
  facts['report'] = str(report)
  return header(f'Done: {step} steps.', facts)
