"""An interrupt ends a program with a sentence, even if Python cannot raise it.

Python raises `KeyboardInterrupt` where the main thread stands, and code that
runs inside an import, such as a callback of a weak reference, may swallow it.
Here one module is imported by such code. After the imports, the callbacks
are those of garbage collection.
"""

import os
import pathlib
import subprocess
import sys

import pytest

import claims

SWALLOWS = """
import os, signal, sys

class Finder:
  def find_spec(self, name, path=None, target=None):
    if name == {module!r}:
      try:
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(100):
          pass
      except KeyboardInterrupt:
        pass

sys.meta_path.insert(0, Finder())
"""
STOPPED = 'Stopped while the program was starting.\n'
ROOT = pathlib.Path(__file__).parents[2]
PROGRAMS = [
  ('main', 'rlinf_jax.run_files.checkpoint'),
  ('serve', 'rlinf_jax.serve.completions'),
  ('chat', 'stages.language.huggingface'),
  ('sweep', 'rlinf_jax.sweep.grid'),
  ('report', 'rlinf_jax.report.report'),
]


def start(program, module, folder, *, ignored=False):
  """Runs a program with --help in which `module` swallows an interrupt."""
  (folder / 'sitecustomize.py').write_text(SWALLOWS.format(module=module))
  signals = 'ignore' if ignored else 'default'
  return subprocess.run(
    [
      *('env', f'--{signals}-signal=INT'),
      *(sys.executable, '-m', f'rlinf_jax.{program}', '--help'),
    ],
    env=os.environ | {'PYTHONPATH': f'{folder}:{ROOT}'},
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=120,
  )


@pytest.mark.parametrize(
  ('program', 'module'), claims.some(PROGRAMS, keep=PROGRAMS[:1])
)
def test_an_interrupt_that_an_import_swallows_ends_the_program(
  program, module, tmp_path
):
  done = start(program, module, tmp_path)
  assert (done.returncode, done.stdout, done.stderr) == (130, '', STOPPED)


def test_an_ignored_interrupt_stays_ignored(tmp_path):
  done = start(*PROGRAMS[-1], tmp_path, ignored=True)
  assert (done.returncode, done.stderr) == (0, '')
  assert done.stdout


COLLECTS = """
import gc, time
from rlinf_jax import startup

def interrupt(phase, info):
  gc.callbacks.remove(interrupt)
  raise KeyboardInterrupt

with startup.ended():
  gc.callbacks.append(interrupt)
  gc.collect()
  time.sleep(60)
"""


def test_an_interrupt_that_a_callback_swallows_ends_the_program():
  done = subprocess.run(
    ['env', '--default-signal=INT', sys.executable, '-c', COLLECTS],
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=30,
  )
  assert (done.returncode, done.stdout, done.stderr) == (130, '', 'Stopped.\n')


CLOSED = """
import asyncio, os, threading
import tensorstore
from rlinf_jax import startup

promise, future = tensorstore.Promise.new()

async def wait():
  await future

async def leave():
  asyncio.ensure_future(wait())
  await asyncio.sleep(0.01)

with startup.ended():
  loop = asyncio.new_event_loop()
  loop.run_until_complete(leave())
  loop.close()
  thread = threading.Thread(target=promise.set_result, args=(1,))
  thread.start()
  thread.join()
  os._exit(0)
"""


def test_tensorstore_prints_nothing_once_orbax_has_failed():
  done = subprocess.run(
    [sys.executable, '-c', CLOSED], cwd=ROOT, capture_output=True, text=True
  )
  assert (done.returncode, done.stdout, done.stderr) == (0, '', '')


PRINTS = """
import gc, signal
print(signal.getsignal(signal.SIGINT).__name__, gc.isenabled())
"""


@pytest.mark.parametrize(
  'arguments', [('-c', f'import rlinf_jax.train\n{PRINTS}'), ('-m', 'other')]
)
def test_programs_of_others_keep_what_python_does(arguments, tmp_path):
  (tmp_path / 'other').mkdir()
  (tmp_path / 'other/__init__.py').write_text('import rlinf_jax\n')
  (tmp_path / 'other/__main__.py').write_text(PRINTS)
  done = subprocess.run(
    ['env', '--default-signal=INT', sys.executable, *arguments],
    env=os.environ | {'PYTHONPATH': f'{tmp_path}:{ROOT}'},
    capture_output=True,
    text=True,
    check=True,
  )
  assert done.stdout == 'default_int_handler True\n'


IMPORTS = """
import gc, sys
sys.orig_argv, sys.argv[:] = ['-m', 'rlinf_jax.chat'], ['-m']
from rlinf_jax import startup
print(gc.isenabled())
kept = [[] for _ in range(10_000)]
with startup.ended():
  print(gc.isenabled(), gc.get_freeze_count() > 10_000)
"""


def test_no_garbage_is_looked_for_until_modules_are_imported():
  done = subprocess.run(
    [sys.executable, '-c', IMPORTS],
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=120,
  )
  assert done.stdout == 'False\nTrue True\n', done.stderr


@pytest.mark.parametrize(
  'file',
  [
    file.relative_to(ROOT)
    for file in (ROOT / 'rlinf_jax').rglob('*.py')
    if "__name__ == '__main__'" in file.read_text()
    # These know the standard library alone.
    and file.name not in ('program.py', 'exit_watcher.py')
  ],
  ids=str,
)
def test_every_program_hears_interrupts_again(file):
  _, ending = (ROOT / file).read_text().split("if __name__ == '__main__':\n")
  assert '  with startup.ended():\n    ' in ending


def test_signs_that_a_locale_lacks_are_written_by_their_numbers(tmp_path):
  script = tmp_path / 'says.py'
  script.write_text(
    'import sys\n'
    "sys.orig_argv, sys.argv[:] = ['-m', 'rlinf_jax.chat'], ['-m']\n"
    'from rlinf_jax import startup\n'
    'startup.begin()\n'
    "print('act → learn')\n"
  )
  done = subprocess.run(
    [sys.executable, script],
    env=os.environ | {'PYTHONIOENCODING': 'latin-1', 'PYTHONPATH': str(ROOT)},
    capture_output=True,
    text=True,
    timeout=120,
  )
  assert done.stdout == 'act \\u2192 learn\n', done.stderr
