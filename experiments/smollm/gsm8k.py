"""Writes the easiest questions of GSM8K, and its test set.

  GSM8K_DIR=… python -m experiments.smollm.gsm8k FOLDER

`easiest.jsonl` has the 500 questions of the training set whose answers take the
fewest steps, which GSM8K writes one a line; of equally many, the shorter answer
is the easier one. `test.jsonl` is the whole test set.
"""

import json
import os
import pathlib
import sys


def easiest(rows: list[dict[str, str]], count: int) -> list[dict[str, str]]:
  """The easiest `count` rows, in their order."""

  def steps(i: int):
    answer = rows[i]['answer']
    return answer.count('\n'), len(answer), i

  return [rows[i] for i in sorted(sorted(range(len(rows)), key=steps)[:count])]


def main(folder: str):
  """Writes both files."""
  path, source = pathlib.Path(folder), pathlib.Path(os.environ['GSM8K_DIR'])
  path.mkdir(parents=True, exist_ok=True)
  lines = (source / 'train.jsonl').read_text('utf-8').splitlines()
  rows = easiest([json.loads(line) for line in lines], 500)
  text = '\n'.join(json.dumps(row) for row in rows) + '\n'
  (path / 'easiest.jsonl').write_text(text)
  (path / 'test.jsonl').write_bytes((source / 'test.jsonl').read_bytes())


if __name__ == '__main__':
  main(sys.argv[1])
