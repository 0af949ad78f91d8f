"""Exports a run's timeline for chrome://tracing and ui.perfetto.dev."""

from collections.abc import Iterable, Iterator, Mapping
import json
import os
import pathlib
from typing import Any

from rlinf_jax.system import whole_file


def events(records: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
  """Converts timeline records to trace events, one track per place.

  Times are in microseconds. The format is described at
  https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
  """
  tracks = {}
  for record in records:
    place = record['place']
    if place not in tracks:
      tracks[place] = len(tracks)
      yield {
        'name': 'thread_name',
        'ph': 'M',
        'pid': 0,
        'tid': tracks[place],
        'args': {'name': place},
      }
    piece, pieces = record['piece']
    yield {
      'name': record['stage'],
      'cat': record['what'],
      'ph': 'X',
      'ts': 1e6 * record['start'],
      'dur': 1e6 * (record['end'] - record['start']),
      'pid': 0,
      'tid': tracks[place],
      'args': {
        'step': record['step'],
        'piece': f'{piece} of {pieces}',
        'cpu_seconds': record['cpu'],
      },
    }


def write(folder: str | os.PathLike):
  """Writes trace.json into a run folder, from its timeline.jsonl.

  A long run has tens of millions of records: one is in memory at a time.
  """
  folder = pathlib.Path(folder)
  with (
    (folder / 'timeline.jsonl').open(encoding='utf-8') as lines,
    whole_file.replaced(folder / 'trace.json') as part,
    part.open('w', encoding='utf-8') as trace,
  ):
    trace.write('{"traceEvents": [')
    for i, event in enumerate(events(map(json.loads, lines))):
      trace.write(f'{"," * (i > 0)}\n{json.dumps(event)}')
    trace.write('\n]}\n')
