"""An end that a process cannot announce is told by another one."""

import subprocess
import sys

import pytest

WATCHED = """
import os, signal, sys
from rlinf_jax.run import exit_watcher

with exit_watcher.watch():
  {}
"""
# Statements, their exit code, and the beginning of what is printed.
ENDS = [
  ('os.abort()', -6, 'The process of the run was ended by SIGABRT. Libraries'),
  ('os.kill(os.getpid(), signal.SIGKILL)', -9, 'The process of the run was en'),
  ('os.kill(os.getpid(), signal.SIGTERM)', -15, 'The process of the run was e'),
  ('sys.exit(3)', 3, ''),
  ('raise SystemExit("A sentence.")', 1, 'A sentence.\n'),
  ('os.fork() or os._exit(0)', 0, ''),
  ('pass', 0, ''),
]


@pytest.mark.parametrize(('statement', 'code', 'line'), ENDS)
def test_a_signal_is_told_and_other_ends_are_not(statement, code, line):
  done = subprocess.run(
    [sys.executable, '-c', WATCHED.format(statement)],
    capture_output=True,
    text=True,
    timeout=60,
  )
  assert (done.returncode, done.stdout) == (code, '')
  assert done.stderr.startswith(line) and bool(done.stderr) == bool(line)
  if code < 0:
    assert done.stderr.endswith('Continue with --resume.\n')
    assert done.stderr.count('\n') == 1


def test_a_run_goes_on_where_nothing_can_watch_it():
  code = WATCHED.format('print("done")')
  done = subprocess.run(
    [sys.executable, '-c', f'import sys; sys.executable = "/none"\n{code}'],
    capture_output=True,
    text=True,
    timeout=60,
  )
  assert (done.returncode, done.stdout, done.stderr) == (0, 'done\n', '')
