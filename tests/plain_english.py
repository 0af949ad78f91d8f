"""Finds docstrings, comments and prose that a reader would stumble over.

  python tests/plain_english.py [--limit N] [FILE …]

Two habits are found: a docstring or comment that opens with a clause ("What a
step needs" instead of "Inputs of a step"), and words for people where the text
speaks of arrays, rows or processes. Each finding is a place to look at, not a
verdict. The exit status is 1 if there are more than N. Without files, all
Python and Markdown that git tracks is read.
"""

import argparse
import ast
import collections
import io
import pathlib
import re
import subprocess
import sys
import tokenize
from typing import NamedTuple

CLAUSE = re.compile(
  r'(what(ever)?|who(ever|m)?|whose|where(ver)?|how|that which|those (who|that)'
  r')\b',
  re.IGNORECASE,
)
PEOPLE = re.compile(
  r'\b(((no|some|any|every)body)|whoever|whom(ever)?|whatever)\b',
  re.IGNORECASE,
)


class Finding(NamedTuple):
  """A place to look at: its line, the habit and the text."""

  line: int
  habit: str
  text: str


def read_prose(text):
  """Yields findings of Markdown, line by line."""
  for number, line in enumerate(text.splitlines(), 1):
    if PEOPLE.search(line):
      yield Finding(number, 'person', line.strip())


def read_python(text):
  """Yields findings of Python's docstrings and comments."""
  documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
  for node in ast.walk(ast.parse(text)):
    doc = isinstance(node, documented) and ast.get_docstring(node)
    if not doc:
      continue
    start = node.body[0].lineno
    lines = doc.splitlines()
    if CLAUSE.match(doc):
      yield Finding(start, 'opening', lines[0])
    for number, line in enumerate(lines, start):
      if PEOPLE.search(line):
        yield Finding(number, 'person', line.strip())
  for token in tokenize.generate_tokens(io.StringIO(text).readline):
    if token.type == tokenize.COMMENT:
      comment = token.string.lstrip('# ')
      if CLAUSE.match(comment) or PEOPLE.search(comment):
        yield Finding(token.start[0], 'comment', comment)


def read(path):
  text = path.read_text()
  return read_python(text) if path.suffix == '.py' else read_prose(text)


def tracked():
  command = ['git', 'ls-files', '*.py', '*.md']
  listed = subprocess.run(command, capture_output=True, text=True, check=True)
  return [
    path for path in map(pathlib.Path, listed.stdout.split()) if path.exists()
  ]


def main():
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--limit', type=int, default=0)
  parser.add_argument('files', nargs='*', type=pathlib.Path)
  args = parser.parse_args()
  findings = [
    (path, finding)
    for path in args.files or tracked()
    for finding in read(path)
  ]
  if len(findings) > args.limit:
    for path, finding in findings:
      print(f'{path}:{finding.line}: {finding.habit}: {finding.text[:100]}')
  habits = collections.Counter(finding.habit for _, finding in findings)
  kinds = ', '.join(f'{n} {habit}' for habit, n in sorted(habits.items()))
  print(f'{len(findings)} places to say plainly, {args.limit} allowed: {kinds}')
  sys.exit(len(findings) > args.limit)


if __name__ == '__main__':
  main()
