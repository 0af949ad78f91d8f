"""Where metrics go: JSON lines, TensorBoard, Weights & Biases.

A writer is two functions. A run folder's `metrics.jsonl`, `timeline.jsonl` and
`samples.jsonl` are all JSON lines: one object a line, each with its `step`, the
number of finished updates. `truncate` takes any of them back to a checkpoint.
"""

from collections.abc import Callable, Iterator, Mapping
import json
import math
import os
import pathlib
from typing import Any, NamedTuple
import uuid


class Writer(NamedTuple):
  """Somewhere for metrics to go.

  Attributes:
    write: `step, values -> None`; `step` counts finished updates.
    close: `() -> None`; nothing may be written after it.
  """

  write: Callable[[int, Mapping[str, Any]], None]
  close: Callable[[], None]


def json_lines(
  path: str | os.PathLike, resume_step: int | None = None
) -> Writer:
  """Appends one JSON object a line, each on disk before `write` returns.

  JSON has no word for numbers that are not finite: they are written as the
  strings 'NaN', 'Infinity' and '-Infinity', which `float` reads back.

  Args:
    path: the file to append to, made if it does not exist.
    resume_step: where a resumed run starts; what `path` holds of later steps
      is removed first.
  """
  path = pathlib.Path(path)
  if resume_step is not None and path.exists():
    truncate(path, resume_step)
  file = path.open('a', encoding='utf-8')

  def write(step: int, values: Mapping[str, Any]) -> None:
    finite = {name: _finite(value) for name, value in values.items()}
    file.write(json.dumps({'step': step, **finite}, allow_nan=False) + '\n')
    file.flush()

  return Writer(write, file.close)


def _finite(value):
  if not isinstance(value, float) or math.isfinite(value):
    return value
  return 'NaN' if math.isnan(value) else f'{"-" * (value < 0)}Infinity'


def records(path: str | os.PathLike) -> Iterator[dict[str, Any]]:
  """Yields the objects of a JSON lines file, in order.

  A last line that a killed process left half-written is skipped.

  Raises:
    ValueError: another line is not a JSON object.
  """
  broken = None
  with pathlib.Path(path).open(encoding='utf-8', errors='replace') as file:
    for number, line in enumerate(file, 1):
      if broken is not None:
        raise ValueError(
          f'{path}, line {broken} is not a JSON object. Only the last line may '
          'be half-written; repair or remove this one.'
        )
      try:
        record = json.loads(line)
      except json.JSONDecodeError:
        record = None
      if isinstance(record, dict):
        yield record
      else:
        broken = number


def truncate(path: str | os.PathLike, step: int) -> None:
  """Keeps the lines of a JSON lines file up to and including `step`.

  A half-written last line goes too. Atomic: whoever opens `path` finds the old
  file or the new one, also after a crash.

  Raises:
    ValueError: a line is not a JSON object with a `step`.
  """
  path = pathlib.Path(path)
  shorter = path.with_name(path.name + '.tmp')
  with shorter.open('w', encoding='utf-8') as file:
    for record in records(path):
      if not isinstance(record.get('step'), int):
        raise ValueError(
          f'{path} holds {record}, which has no whole number `step`; cannot '
          f'tell whether it belongs to the first {step} steps.'
        )
      if record['step'] <= step:
        file.write(json.dumps(record, allow_nan=False) + '\n')
    file.flush()
    os.fsync(file.fileno())
  shorter.replace(path)


def tensorboard(
  folder: str | os.PathLike, resume_step: int | None = None
) -> Writer:
  """Writes TensorBoard events, a scalar a metric.

  Args:
    folder: where the event files go.
    resume_step: where a resumed run starts; TensorBoard hides what earlier
      event files hold of later steps.
  """
  import tensorboardX

  events = tensorboardX.SummaryWriter(
    str(folder),
    purge_step=None if resume_step is None else resume_step + 1,
    flush_secs=10,
  )

  def write(step: int, values: Mapping[str, float]) -> None:
    for name, value in values.items():
      events.add_scalar(name, value, step)

  return Writer(write, events.close)


def wandb(
  project: str,
  folder: str | os.PathLike,
  config: Mapping[str, Any] | None = None,
) -> Writer:
  """Sends metrics to Weights & Biases, where it is installed.

  Args:
    project: the project of the run there.
    folder: the run folder. The run's id is kept in it, so a resumed run goes on
      where it was; steps that are trained again are already there and skipped.
    config: settings to show beside the run.

  Raises:
    ImportError: the `wandb` package is not installed.
  """
  try:
    import wandb as client
  except ImportError as error:
    raise ImportError(
      f'Metrics were asked to go to the W&B project {project!r}, but the '
      'package wandb is not installed. Install it with `pip install wandb`, or '
      'leave W&B out of the configuration.'
    ) from error
  folder = pathlib.Path(folder)
  id_file = folder / 'wandb_id.txt'
  if not id_file.exists():
    id_file.write_text(uuid.uuid4().hex[:16])
  run = client.init(
    project=project,
    name=folder.name,
    id=id_file.read_text(),
    resume='allow',
    dir=str(folder),
    config=dict(config or {}),
  )

  def write(step: int, values: Mapping[str, float]) -> None:
    run.log(dict(values), step=step)

  return Writer(write, run.finish)
