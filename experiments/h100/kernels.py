"""Seconds of a GPU's kernels, from the trace that `profile_step` records.

python -m experiments.h100.kernels runs/h100/run/profile [rows]
"""

import collections
import pathlib
import sys

import jax

PLANE = '/device:GPU:0'


def stats(event) -> dict[str, str]:
  """Statistics of an event, by name."""
  return {name: str(value) for name, value in event.stats if name}


def read(folder: pathlib.Path):
  """Nanoseconds and calls by compiled program, operation and kernel."""
  (path,) = folder.rglob('*.xplane.pb')
  found = collections.defaultdict(lambda: [0.0, 0])
  for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
    if plane.name != PLANE:
      continue
    for line in plane.lines:
      if not line.name.startswith('Stream'):
        continue
      for event in line.events:
        of = stats(event)
        operation = of.get('tf_op') or of.get('name') or of.get('hlo_op', '')
        key = of.get('hlo_module', ''), operation, event.name
        found[key][0] += event.duration_ns
        found[key][1] += 1
  return found


def main(folder: str, rows: str = '30'):
  """Prints the longest kernels of each compiled program."""
  found = read(pathlib.Path(folder))
  programs = collections.Counter()
  for (program, *_), (took, _) in found.items():
    programs[program] += took
  for program, total in programs.most_common(6):
    print(f'\n{program}: {total / 1e9:.3f} s in kernels')
    mine = [(x, key) for key, x in found.items() if key[0] == program]
    mine.sort(key=lambda item: -item[0][0])
    for (took, calls), (_, operation, kernel) in mine[: int(rows)]:
      print(
        f'{took / 1e6:10.2f} ms {100 * took / total:5.1f} % {calls:7d} calls  '
        f'{operation[-110:]}  {kernel[:60]}'
      )


if __name__ == '__main__':
  main(*sys.argv[1:])
