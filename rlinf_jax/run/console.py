"""Console output of a training run: one line per step and per evaluation.

On a terminal the lines scroll above a progress bar. In a file or a pipe they
are plain text.
"""

from collections.abc import Callable, Mapping
import math
import os
import pathlib
import sys
from typing import Any, NamedTuple, TextIO

from rlinf_jax.report import by_set, predicted
from rlinf_jax.report.html import curves
from rlinf_jax.run_files import failures, writers

# Fields of the line of a step and of an evaluation, in order; a field whose
# metric is missing is left out.
STEP = (
  'reward {rollout/reward_mean:.2f}',
  'accuracy {rollout/accuracy:.2f}',
  'success {env/success_once:.2f}',
  'loss {train/loss:.3f}',
  'length {rollout/response_length_mean:.1f}/{rollout/response_length_max:.0f}',
  '{throughput/tokens_per_second:,.0f} tok/s',
  '{throughput/steps_per_second:,.0f} env steps/s',
  'waiting: simulators {wait/simulators:.0%} policy {wait/policy:.0%}',
)
EVALUATION = (
  'accuracy {eval/accuracy:.1%}',
  'success {eval/success_once:.1%}',
  'success at end {eval/success_at_end:.1%}',
  'loss {eval/loss:.3f}',
  'agreement {eval/agreement:.1%}',
  'reward {eval/reward:.2f}',
  'return {eval/return:.2f}',
  'length {eval/response_length_mean:.1f}/{eval/response_length_max:.0f}',
  'episode length {eval/episode_length:.1f}',
)
# Stages that take less of a step, or fewer seconds, are not named in its line.
LEAST_SHARE = 0.01
LEAST_SECONDS = 0.005  # Fewer are printed as 0.00.
GAP = '  '  # Between the fields of a line.
# Metrics that summarize evaluations, by name, and how they are formatted.
SCORES = {
  'accuracy': ('eval/accuracy', '.1%'),
  'success': ('eval/success_once', '.1%'),
  'return': ('eval/return', '.2f'),
  'loss': ('eval/loss', '.3f'),
  'agreement': ('eval/agreement', '.1%'),
}


class Console(NamedTuple):
  """A metrics writer that prints.

  Attributes:
    write: `step, values -> None`, prints one line; evaluations are highlighted.
    close: removes the progress bar; may be called more than once.
    print: `text -> None`, prints other lines, above the progress bar.
  """

  write: Callable[[int, Mapping[str, float]], None]
  close: Callable[[], None]
  print: Callable[[str], None]


def create(steps: int, start: int = 0, stream: TextIO | None = None) -> Console:
  """Creates the console of a run.

  Args:
    steps: steps of the whole run.
    start: updates finished before, in a resumed run.
    stream: stream to print to; standard output by default.
  """
  stream = sys.stdout if stream is None else stream
  if stream.isatty():
    return _terminal(steps, start, stream)
  return _plain(steps, stream)


def _plain(steps: int, stream: TextIO) -> Console:
  read = True

  def print_line(text: str) -> None:
    nonlocal read
    if read:
      try:
        print(text, file=stream, flush=True)
      except BrokenPipeError:
        # The reader has ended, as Ctrl-C ends `tee`. The run goes on, or stops
        # with a checkpoint.
        read = False

  def write(step: int, values: Mapping[str, float]) -> None:
    text = format_step(step, steps, values)
    print_line(f'--- {text} ---' if _is_evaluation(values) else text)

  return Console(write, lambda: None, print_line)


def _terminal(steps: int, start: int, stream: TextIO) -> Console:
  # Imported here because it takes a tenth of a second.
  import rich.console
  import rich.progress
  import rich.text

  bar = rich.progress.Progress(
    rich.progress.TextColumn('training'),
    rich.progress.BarColumn(bar_width=None),
    rich.progress.MofNCompleteColumn(),
    rich.progress.TimeElapsedColumn(),
    rich.progress.TextColumn('remaining'),
    rich.progress.TimeRemainingColumn(),
    console=rich.console.Console(file=stream),
    # Rarely: the thread of the bar competes with training for the cores.
    refresh_per_second=2,
    transient=True,
    expand=True,
  )
  task = bar.add_task('training', total=steps, completed=start)
  bar.start()

  def print_line(text: str) -> None:
    bar.console.print(rich.text.Text(text), soft_wrap=True)

  def write(step: int, values: Mapping[str, float]) -> None:
    width = bar.console.width
    line = format_step(step, steps, values, width)
    text = rich.text.Text(line, overflow='ellipsis')
    if _is_evaluation(values):
      text.stylize('bold green')
    else:
      text.highlight_regex(r'[a-z/_]+', 'dim')
    bar.console.print(text, no_wrap=True)
    bar.update(task, completed=step)

  return Console(write, bar.stop, print_line)


def _is_evaluation(values: Mapping[str, float]) -> bool:
  return any(name.startswith('eval/') for name in values)


def format_step(
  step: int,
  steps: int,
  values: Mapping[str, float],
  width: float = math.inf,
) -> str:
  """Formats the metrics of a step or an evaluation as one line.

  Args:
    step: its number.
    steps: steps of the whole run.
    values: metrics by name.
    width: characters of the line. Fields that do not fit are left out, and the
      stages that are not named are summed as `other`.
  """
  parts = [f'step {step:{len(str(steps))}}/{steps}']
  fields = STEP
  if _is_evaluation(values):
    parts.insert(0, 'evaluation')
    several = curves.of_samples(values).items()
    scores = [f'{label} {{{name}:.1%}}' for label, name in several]
    fields = (*EVALUATION[:1], *scores, *EVALUATION[1:])
  line = GAP.join(parts)
  for field in fields:
    try:
      longer = line + GAP + field.format_map(values)
    except KeyError:
      continue
    if len(longer) <= width:
      line = longer
  seconds = _seconds(values, width - len(line) - len(GAP))
  return line + GAP + seconds if seconds else line


def _seconds(values: Mapping[str, float], width: float) -> str:
  """Formats the seconds of as many stages as fit, the longest first."""
  seconds = {
    name.removeprefix('time/'): value
    for name, value in values.items()
    if name.startswith('time/') and name != 'time/step'
  }
  total = sum(seconds.values())
  longest = sorted(seconds, key=seconds.__getitem__, reverse=True)
  least = max(LEAST_SHARE * total, LEAST_SECONDS)
  named = [x for x in longest if seconds[x] >= least]
  while named:
    words = [f'{name} {seconds[name]:.2f}s' for name in named]
    other = total - sum(seconds[name] for name in named)
    if other > least:
      words.append(f'other {other:.2f}s')
    if len(text := ' '.join(words)) <= width:
      return text
    named.pop()
  return ''


def format_facts(title: str, facts: Mapping[str, str]) -> str:
  """Formats a title line and one indented line per fact, aligned."""
  width = max((len(name) for name in facts), default=0)
  rows = [f'  {name:{width}}  {fact}' for name, fact in facts.items()]
  return '\n'.join([title, *rows])


def format_summary(
  folder: str | os.PathLike, seconds: float, report: str | os.PathLike
) -> str:
  """Formats the outcome of a run, read from the metrics in its folder.

  Args:
    folder: the run folder.
    seconds: duration of the run.
    report: the path of the report, or the reason why there is none.
  """
  metrics = pathlib.Path(folder) / 'metrics.jsonl'
  step, first, last = 0, {}, {}
  for values in writers.records(metrics) if metrics.exists() else ():
    step = max(step, values['step'])
    last |= values
    first = values | first
  facts = {}
  for name, (score, form) in SCORES.items():
    if score in last:
      before, after = (float(x[score]) for x in (first, last))
      facts[name] = f'{before:{form}} -> {after:{form}} (held out)'
  facts['time'] = f'{seconds / 60:.1f} minutes'
  if prediction := predicted.describe_step(folder):
    facts['step time'] = prediction
  facts['folder'] = str(folder)
  facts['report'] = str(report)
  if found := failures.read(folder):
    facts['problems'] = ' '.join(found)
  steps = 'step' if step == 1 else 'steps'
  text = format_facts(f'Finished {step} {steps}.', facts)
  return '\n'.join([text, *_by_set(first, last)])


def _by_set(first: Mapping[str, Any], last: Mapping[str, Any]) -> list[str]:
  """Lines with the first and last score of each set or task, if any."""
  rows = [
    f'  {float(first[metric]):6.1%} -> {float(last[metric]):6.1%}  {name}'
    for metric, name in by_set.names(last).items()
  ]
  return ['By set or task (held out):', *rows] if rows else []
