"""Exports a run's timeline for chrome://tracing and ui.perfetto.dev."""

from collections.abc import Iterable, Mapping
import json
import os
import pathlib
from typing import Any


def events(records: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
  """Converts timeline records to trace events, one track per place.

  Times are in microseconds. The format is described at
  https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
  """
  tracks, spans = {}, []
  for record in records:
    track = tracks.setdefault(record['place'], len(tracks))
    piece, pieces = record['piece']
    spans.append(
      {
        'name': record['stage'],
        'cat': record['what'],
        'ph': 'X',
        'ts': 1e6 * record['start'],
        'dur': 1e6 * (record['end'] - record['start']),
        'pid': 0,
        'tid': track,
        'args': {
          'step': record['step'],
          'piece': f'{piece} of {pieces}',
          'cpu_seconds': record['cpu'],
        },
      }
    )
  names = [
    {
      'name': 'thread_name',
      'ph': 'M',
      'pid': 0,
      'tid': track,
      'args': {'name': place},
    }
    for place, track in tracks.items()
  ]
  return names + spans


def write(folder: str | os.PathLike):
  """Writes trace.json into a run folder, from its timeline.jsonl."""
  folder = pathlib.Path(folder)
  lines = (folder / 'timeline.jsonl').read_text().splitlines()
  content = {'traceEvents': events(map(json.loads, lines))}
  (folder / 'trace.json').write_text(json.dumps(content))
