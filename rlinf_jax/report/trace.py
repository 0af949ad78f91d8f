"""A run's timeline for chrome://tracing and ui.perfetto.dev."""

from collections.abc import Iterable, Mapping
import json
import os
import pathlib
from typing import Any


def events(records: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
  """Lines of timeline.jsonl as events, a row a place, in microseconds.

  https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
  """
  rows, made = {}, []
  for record in records:
    row = rows.setdefault(record['place'], len(rows))
    piece, pieces = record['piece']
    made.append(
      {
        'name': record['stage'],
        'cat': record['what'],
        'ph': 'X',
        'ts': 1e6 * record['start'],
        'dur': 1e6 * (record['end'] - record['start']),
        'pid': 0,
        'tid': row,
        'args': {
          'step': record['step'],
          'piece': f'{piece} of {pieces}',
          'cpu_seconds': record['cpu'],
        },
      }
    )
  named = [
    {
      'name': 'thread_name',
      'ph': 'M',
      'pid': 0,
      'tid': row,
      'args': {'name': place},
    }
    for place, row in rows.items()
  ]
  return named + made


def write(folder: str | os.PathLike):
  """Writes trace.json into a run folder, from its timeline.jsonl."""
  folder = pathlib.Path(folder)
  lines = (folder / 'timeline.jsonl').read_text().splitlines()
  made = {'traceEvents': events(map(json.loads, lines))}
  (folder / 'trace.json').write_text(json.dumps(made))
