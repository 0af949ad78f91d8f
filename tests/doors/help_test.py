"""--help: it ends without an error, and its examples can be pasted."""

import copy
import importlib
import pathlib
import shlex
import subprocess
import sys

from absl import flags
import pytest

import claims
from rlinf_jax import gin_flags, main
from rlinf_jax.sweep import grid, sweep

ROOT = pathlib.Path(__file__).parents[2]
MODULES = {'rlinf_jax.main': main, 'rlinf_jax.sweep': sweep}


def examples():
  """The command lines in the help texts, without what the shell joins."""
  for module in MODULES.values():
    text = module.__doc__.replace('\\\n', '')
    for line in text.splitlines():
      if line.strip().startswith('python -m '):
        yield shlex.split(line)


EXAMPLES = [*examples()]


def test_both_texts_have_examples():
  assert {words[2] for words in EXAMPLES} == set(MODULES)


@pytest.mark.parametrize('words', EXAMPLES, ids=' '.join)
def test_an_example_has_known_flags_files_and_settings(words, monkeypatch):
  monkeypatch.chdir(ROOT)
  arguments = [x for x in words[2:] if x not in gin_flags.HELP]
  given = copy.deepcopy(flags.FLAGS)
  rest = given([gin_flags.as_binding(x) for x in arguments])
  assert rest == [words[2]]  # Nothing but flags.
  assert given['gin_file'].value
  for name in [*given['gin_file'].value, given['cluster'].value]:
    assert pathlib.Path(name).exists(), name
  names = {macro.name for macro in gin_flags.macros(given['gin_file'].value)}
  for binding in given['gin_bindings'].value:
    assert binding.partition('=')[0].strip() in names
  for over in given['over'].value:
    grid.parse_over(over)


@pytest.mark.parametrize('name', [main.__name__, 'rlinf_jax.sweep.__main__'])
def test_help_lists_the_flags_of_a_program(name):
  importlib.import_module(name)
  listed = {flag.name for flag in flags.FLAGS.get_key_flags_for_module(name)}
  assert listed >= {'gin_file', 'gin_bindings', 'workdir'}
  assert ('over' in listed) == ('sweep' in name)


@pytest.mark.parametrize(
  ('program', 'flag'),
  claims.some(
    [
      *(('main', '--help'), ('chat', '--help'), ('sweep', '--help')),
      *(('serve', '--help'), ('prepare.tiny_vla', '--help')),
    ],
    keep=[('main', '--help'), ('chat', '--help')],
  ),
)
def test_help_is_no_error(program, flag):
  done = subprocess.run(
    [sys.executable, '-m', f'rlinf_jax.{program}', flag],
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=120,
  )
  assert (done.returncode, done.stderr) == (0, '')
  assert '--' in done.stdout
