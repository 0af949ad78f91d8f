"""Runs the commands of claims, and writes `docs/claims.md`.

  python -m experiments.claims [NAME …]    # all of them: `make claims`
  python -m experiments.claims --write     # the page alone

A round goes on where it was stopped: commands that have succeeded in it are not
run again, and the page is written after each claim. Once all claims have been
run, the next call starts a new round.
"""

import argparse
import datetime
import hashlib
import json
import os
import pathlib
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from typing import NamedTuple

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
RECORDS = HERE / 'records.json'
PAGE = ROOT / 'docs/claims.md'
ROUND = ROOT / 'runs/claims/round'
# A command may print what it found, as its last line of this kind.
FIGURE = re.compile('^figure: (.*)$', re.MULTILINE)
# Of the last line of pytest.
SKIPPED = re.compile(r'(\d+) skipped.* in [\d.]+s', re.MULTILINE)
HEAD = """# Claims

Every claim, the figure that was last found, and the commands that find it. A
command that is a test proves its figure: it fails where the claim is wrong.
`make claims` runs all commands, for many hours, and writes this page; started
again, it goes on where it was stopped. `make test` proves a small instance of
each claim, except those about whole learning runs and about speed. Skipped
tests, such as those of a library that is not installed, are counted beside the
figure. "By hand" marks a figure that was not found by `make claims`, but by
running the commands shown, or those of the page named; words such as "one seed"
say in how many runs. "See there" refers to that page for the machine.

| claim | figure | found by | commit | date | machine |
|---|---|---|---|---|---|
"""


class Claim(NamedTuple):
  """One claim: its sentence, figure and commands.

  Attributes:
    name: by which `make claims NAMES=…` selects it.
    claim: in words.
    figure: what its commands find or, if they print no figure, confirm.
    commands: lines of shell, run one after the other in the root folder; none
      where the figure was measured by hand.
    page: that describes the method, if there is one.
    by_hand: commit and date of the figure where its commands were last run by
      hand, which is shown until a record has a later one.
  """

  name: str
  claim: str
  figure: str
  commands: tuple[str, ...]
  page: str | None = None
  by_hand: tuple[str, str] | None = None


def read() -> list[Claim]:
  entries = tomllib.loads((HERE / 'claims.toml').read_text())['claim']
  claims = [Claim(**{**x, 'commands': tuple(x['commands'])}) for x in entries]
  names = [claim.name for claim in claims]
  assert len({*names}) == len(names), 'Two claims have one name.'
  return claims


def git(*words) -> str:
  command = ['git', *words]
  return subprocess.run(
    command, cwd=ROOT, check=True, capture_output=True, text=True
  ).stdout.strip()


def machine() -> str:
  """The processor and how many cores of it."""
  info = pathlib.Path('/proc/cpuinfo')
  models = (
    re.findall('model name.*: (.*)', info.read_text()) if info.exists() else []
  )
  model = models[0] if models else platform.machine()
  return f'{os.cpu_count()} cores of {model}'


def run(command) -> dict:
  """Runs one command, unless this round has its result already.

  Returns:
    What is stored of it: its status, seconds, figure, number of skipped tests,
    commit, date, machine.
  """
  digest = hashlib.sha256(command.encode()).hexdigest()[:12]
  file, log = ROUND / f'{digest}.json', ROUND / f'{digest}.log'
  if file.exists():
    return json.loads(file.read_text())
  ROUND.mkdir(parents=True, exist_ok=True)
  print(f'$ {command}\n  {log}', flush=True)
  start = time.monotonic()
  words = f'python() {{ {shlex.quote(sys.executable)} "$@"; }}; {command}'
  with log.open('w') as output:
    status = subprocess.run(
      ['bash', '-c', words], cwd=ROOT, stdout=output, stderr=subprocess.STDOUT
    ).returncode
  printed = log.read_text()
  figures = FIGURE.findall(printed)
  result = {
    'command': command,
    'status': status,
    'seconds': round(time.monotonic() - start, 1),
    'figure': figures[-1] if figures else None,
    'skipped': sum(map(int, SKIPPED.findall(printed))),
    'commit': git('rev-parse', '--short=8', 'HEAD')
    + ('+' if git('status', '--porcelain') else ''),
    'date': datetime.date.today().isoformat(),
    'machine': machine(),
  }
  if status == 0:  # A failed command runs again in the next call.
    file.write_text(json.dumps(result, indent=2))
  return result


def record(claim, results) -> dict:
  """Record of a claim whose commands have all succeeded."""
  last = results[-1]
  figures = [x['figure'] for x in results if x['figure']]
  found = {name: last[name] for name in ('commit', 'date', 'machine')}
  if skipped := sum(x.get('skipped', 0) for x in results):
    found['skipped'] = skipped
  return found | {'figure': ', '.join(figures) or claim.figure}


def write(claims, records):
  """Writes the page, and the records that it is made from."""
  names = {claim.name for claim in claims}
  records = {name: records[name] for name in sorted(names & records.keys())}
  text = json.dumps(records, indent=2, ensure_ascii=False)
  RECORDS.write_text(text + '\n')
  PAGE.write_text(HEAD + ''.join(row(x, records.get(x.name)) for x in claims))


def row(claim, found) -> str:
  commands = '<br>'.join(f'`{command}`' for command in claim.commands)
  if claim.page:
    # Not a link: the page is part of a site that has no experiments.
    commands = f'`{claim.page}`: {commands}'
  if not found or claim.by_hand and found['date'] < claim.by_hand[1]:
    found = by_hand(claim)
  figure = found.get('figure', claim.figure)
  if skipped := found.get('skipped'):
    figure += f' ({skipped} tests skipped)'
  cells = [
    claim.claim,
    figure,
    commands,
    *(found[name] for name in ('commit', 'date', 'machine')),
  ]
  return '| ' + ' | '.join(x.replace('|', '\\|') for x in cells) + ' |\n'


def by_hand(claim) -> dict:
  """Commit, date and machine of a claim that has no record."""
  if not claim.by_hand:
    return dict.fromkeys(('commit', 'date', 'machine'), 'not run yet')
  commit, date = claim.by_hand
  return {'commit': f'{commit}, by hand', 'date': date, 'machine': 'see there'}


def main():
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument(
    'names', nargs='*', help='of claims; all if there is none'
  )
  parser.add_argument('--write', action='store_true', help='run no command')
  args = parser.parse_args()
  claims = read()
  records = json.loads(RECORDS.read_text()) if RECORDS.exists() else {}
  if unknown := set(args.names) - {claim.name for claim in claims}:
    parser.error(f'No claim is called {", ".join(sorted(unknown))}.')
  chosen = [x for x in claims if x.name in args.names or not args.names]
  failed = []
  for claim in chosen:
    if args.write or not claim.commands:
      continue
    results = [run(command) for command in claim.commands]
    if any(result['status'] for result in results):
      failed.append(claim.name)
      print(f'  {claim.name} failed', flush=True)
      continue
    records[claim.name] = record(claim, results)
    write(claims, records)
  write(claims, records)
  if failed:
    sys.exit(f'Failed, and run again by the next call: {", ".join(failed)}')
  if not args.names and not args.write:
    shutil.rmtree(ROUND, ignore_errors=True)


if __name__ == '__main__':
  main()
