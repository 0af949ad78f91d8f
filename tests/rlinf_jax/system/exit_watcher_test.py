"""An end that a process cannot announce is told by another one."""

import subprocess
import sys
import threading

import pytest

WATCHED = """
import os, signal, sys
from rlinf_jax.system import exit_watcher

exit_watcher.start()
{}
"""
SENTENCE = 'The process ended in the middle, with '
# Statements, their exit code, and the beginning of what is printed.
ENDS = [
  ('os.abort()', -6, f'{SENTENCE}SIGABRT. Libraries'),
  ('os.kill(os.getpid(), signal.SIGKILL)', -9, f'{SENTENCE}SIGKILL. Libraries'),
  (
    'os.kill(os.getpid(), signal.SIGTERM)',
    -15,
    f'{SENTENCE}SIGTERM. A scheduler',
  ),
  ('os._exit(127)', 127, f'{SENTENCE}exit code 127. '),
  ('sys.exit(3)', 3, ''),
  ('sys.exit("A sentence.")', 1, 'A sentence.\n'),
  ('raise KeyError("x")', 1, 'Traceback'),
  ('exit_watcher.announce(); os._exit(2)', 2, ''),
  ('os.fork()', 0, ''),
  ('os.fork() or os.abort()', 0, ''),
  ('pass', 0, ''),
]


@pytest.mark.parametrize(('statement', 'code', 'line'), ENDS)
def test_an_end_in_the_middle_is_told_and_others_are_not(statement, code, line):
  done = subprocess.run(
    [sys.executable, '-c', WATCHED.format(statement)],
    capture_output=True,
    text=True,
    timeout=60,
  )
  assert (done.returncode, done.stdout) == (code, '')
  assert done.stderr.startswith(line) and bool(done.stderr) == bool(line)
  if line.startswith(SENTENCE):
    assert done.stderr.endswith('A training run continues with --resume.\n')
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


BUSY = """
import time
def work(seconds):
  end = time.monotonic() + seconds
  while time.monotonic() < end:
    pause = time.process_time() + 0.03  # The smallest unit is a hundredth.
    while time.process_time() < pause:
      pass
    time.sleep(0.1)
"""
STILL = """
import subprocess, sys, time
from rlinf_jax.system import exit_watcher

exit_watcher.STILL = 1.0
exit_watcher.start()
"""
REPORT = 'The run has used no processor time'


@pytest.mark.parametrize(
  ('statement', 'times'),
  [
    ('input()', 1),
    ('subprocess.run(["head", "-n", "1"], stdout=subprocess.DEVNULL)', 1),
    # It is reported again once it has worked.
    ('input(); work(0.5); input()', 2),
    # By the first report the watcher has started.
    ('input(); work(2.5)', 1),
    ('input(); subprocess.run([sys.executable, "-c", f"{BUSY}work(2.5)"])', 1),
  ],
)
def test_a_run_that_stands_still_is_reported(statement, times):
  """It reads a line, in vain until it is reported."""
  code = f'BUSY = {BUSY!r}\nexec(BUSY){STILL}{statement}'
  pipes = dict.fromkeys(('stdin', 'stdout', 'stderr'), subprocess.PIPE)
  process = subprocess.Popen([sys.executable, '-c', code], text=True, **pipes)
  deadline = threading.Timer(60, process.kill)  # It may never be reported.
  deadline.start()
  for _ in range(times):
    assert process.stderr.readline().startswith(REPORT)
    process.stdin.write('\n')
    process.stdin.flush()
  out, error = process.communicate()
  deadline.cancel()
  assert (process.returncode, out, error) == (0, '', '')
