"""Metrics writers: JSON lines, TensorBoard, Weights & Biases.

A writer is a pair of functions. A run folder's `metrics.jsonl`,
`timeline.jsonl` and `samples.jsonl` are JSON lines: one object per line, each
with its `step`, the number of finished updates. `truncate` cuts any of them
back to a checkpoint.
"""

from collections.abc import Callable, Iterator, Mapping
import json
import math
import os
import pathlib
import time
from typing import Any, NamedTuple
import uuid

from rlinf_jax.system import whole_file

FLUSH_SECONDS = 10  # Between flushes of TensorBoard's events.
TAIL = 65_536  # Bytes at the end of a file.


class Writer(NamedTuple):
  """A destination of metrics.

  Attributes:
    write: `step, values -> None`; `step` counts finished updates.
    close: `() -> None`; no write may follow.
  """

  write: Callable[[int, Mapping[str, Any]], None]
  close: Callable[[], None]


def json_lines(
  path: str | os.PathLike, resume_step: int | None = None
) -> Writer:
  """Appends JSON objects to a file, one per line, flushed after each write.

  JSON cannot represent numbers that are not finite. They are written as the
  strings 'NaN', 'Infinity' and '-Infinity', which `float` reads back.

  Args:
    path: the file to append to; created if it does not exist.
    resume_step: the step from which a run resumes; records of later steps are
      removed first.
  """
  path = pathlib.Path(path)
  if resume_step is not None and path.exists():
    truncate(path, resume_step)
  file = path.open('a', encoding='utf-8')

  def write(step: int, values: Mapping[str, Any]) -> None:
    encoded = {name: _encode(value) for name, value in values.items()}
    file.write(json.dumps({'step': step, **encoded}, allow_nan=False) + '\n')
    file.flush()

  return Writer(write, file.close)


def _encode(value):
  if not isinstance(value, float) or math.isfinite(value):
    return value
  return 'NaN' if math.isnan(value) else f'{"-" * (value < 0)}Infinity'


def records(path: str | os.PathLike) -> Iterator[dict[str, Any]]:
  """Yields the objects of a JSON lines file, in order.

  A half-written last line, left by a killed process, is skipped.

  Raises:
    ValueError: if another line is not a JSON object.
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


def last_records(path: str | os.PathLike) -> list[dict[str, Any]]:
  """The last objects of a JSON lines file whose lines are all complete.

  They are those within its last `TAIL` bytes, as the file may be large.
  """
  with pathlib.Path(path).open('rb') as file:
    start = max(0, file.seek(0, os.SEEK_END) - TAIL)
    file.seek(start)
    lines = file.read().splitlines()
  return [json.loads(line) for line in lines[start > 0 :]]


def truncate(path: str | os.PathLike, step: int) -> None:
  """Removes the records of a JSON lines file after `step`, atomically.

  A half-written last line is removed too.

  Raises:
    ValueError: if a line is not a JSON object with a `step`.
  """
  path = pathlib.Path(path)
  with (
    whole_file.replaced(path) as shorter,
    shorter.open('w', encoding='utf-8') as file,
  ):
    for record in records(path):
      if not isinstance(record.get('step'), int):
        raise ValueError(
          f'{path} contains {record}, whose `step` is not a whole number, so '
          f'it is unknown whether it belongs to the first {step} steps. Repair '
          'or remove that line.'
        )
      if record['step'] <= step:
        file.write(json.dumps(record, allow_nan=False) + '\n')
    file.flush()
    os.fsync(file.fileno())


def tensorboard(
  folder: str | os.PathLike, resume_step: int | None = None
) -> Writer:
  """Writes TensorBoard events, one scalar per metric.

  Args:
    folder: the folder of the event files.
    resume_step: the step from which a run resumes; TensorBoard hides events of
      later steps in earlier files.
  """
  from tensorboardX import event_file_writer, summary
  from tensorboardX.proto import event_pb2

  folder = pathlib.Path(folder)
  folder.mkdir(parents=True, exist_ok=True)
  # A `SummaryWriter` has a thread and a function at exit, which print
  # tracebacks if a disk is full. Here the run learns of it.
  events = event_file_writer.EventsWriter(str(folder / 'events'))
  last_flush = time.monotonic()

  def add(step, **content):
    event = event_pb2.Event(wall_time=time.time(), step=step, **content)
    events.write_event(event)

  if resume_step is not None:
    start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
    add(resume_step + 1, session_log=start)

  def write(step: int, values: Mapping[str, float]) -> None:
    nonlocal last_flush
    for name, value in values.items():
      add(step, summary=summary.scalar(name, value))
    if time.monotonic() - last_flush > FLUSH_SECONDS:
      events.flush()
      last_flush = time.monotonic()

  return Writer(write, events.close)


def wandb(
  project: str,
  folder: str | os.PathLike,
  config: Mapping[str, Any] | None = None,
) -> Writer:
  """Sends metrics to Weights & Biases.

  Args:
    project: the project at Weights & Biases.
    folder: the run folder. It stores the run's id, so that a resumed run
      continues the same run there; steps trained again are skipped.
    config: settings to show with the run.

  Raises:
    ImportError: if the package `wandb` is not installed.
  """
  try:
    import wandb as client
  except ImportError as error:
    raise ImportError(
      f'The recipe sends metrics to the W&B project {project!r}, but the '
      'package wandb is not installed. Install it with `pip install wandb`, or '
      'do not bind `train.train.wandb_project`.'
    ) from error
  folder = pathlib.Path(folder)
  id_file = folder / 'wandb_id.txt'
  if not id_file.exists():
    whole_file.write_text(id_file, uuid.uuid4().hex[:16])
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
