"""The wheel, installed without this checkout.

The virtual environment contains the wheel and, as links to the installed
packages, exactly those of `requirements/core.txt`: neither the extras of the
tests nor the editable install of this checkout.
"""

from importlib import metadata
import json
import pathlib
import subprocess
import sys
import venv

import pytest

ROOT = pathlib.Path(__file__).parents[2]
BINDINGS = (
  'STEPS = 3',
  'imitate/train.train.steps = 2',
  'warm_start.checkpoint.layers = 1',
  'GROUP = 4',
  "train.train.plan = {'micro_batch': {'gradient': 8}}",
  'arithmetic.problems.batch_size = 4',
  'arithmetic.problems.held_out = 8',
  'arithmetic.problems.held_out_batch = 8',
)
JOB = [
  '--gin_file=gin_configs/grpo_arithmetic.gin',
  *(f'--gin_bindings={binding}' for binding in BINDINGS),
]


PACKAGES = ('rlinf_jax', 'stages', 'sharding', 'planner')


def files(folder):
  return {
    str(path.relative_to(folder))
    for path in folder.rglob('*.*')
    if path.suffix != '.pyc'
  }


def run(*command, **kwargs):
  done = subprocess.run(command, capture_output=True, text=True, **kwargs)
  assert done.returncode == 0, done.stdout + done.stderr
  return done.stdout


@pytest.fixture(scope='module')
def wheel(tmp_path_factory):
  folder = tmp_path_factory.mktemp('wheel')
  run(
    sys.executable,
    '-m',
    'pip',
    'wheel',
    '--no-deps',
    '--no-index',
    '--no-build-isolation',
    '--wheel-dir',
    folder,
    ROOT,
  )
  (wheel,) = folder.glob('rlinf_jax-*.whl')
  return wheel


@pytest.fixture(scope='module')
def python(wheel, tmp_path_factory):
  home = tmp_path_factory.mktemp('venv')
  venv.create(home, symlinks=True)
  (site,) = home.glob('lib/python*/site-packages')
  for line in (ROOT / 'requirements' / 'core.txt').read_text().splitlines():
    if '==' in line:
      distribution = metadata.distribution(line.partition('==')[0])
      for top in {path.parts[0] for path in distribution.files} - {'..'}:
        source, link = distribution.locate_file(top), site / top
        if top != '__pycache__' and not link.exists():
          link.symlink_to(source)
  python = home / 'bin' / 'python'
  run(
    sys.executable,
    '-m',
    'pip',
    '--python',
    python,
    'install',
    '--no-deps',
    '--no-index',
    wheel,
  )
  return python


@pytest.fixture
def empty_folder(tmp_path, monkeypatch):
  monkeypatch.delenv('PYTHONPATH', raising=False)
  monkeypatch.chdir(tmp_path)
  return tmp_path


@pytest.mark.slow
def test_the_wheel_is_complete_and_self_contained(python, empty_folder):
  code = f"""if True:
    import importlib.util, json, sys
    import {', '.join(PACKAGES)}
    print(json.dumps([
      [module.__path__[0] for module in ({', '.join(PACKAGES)})],
      [bool(importlib.util.find_spec(name)) for name in ('torch', 'pytest')],
      sys.path,
    ]))
  """
  folders, extras, path = json.loads(run(python, '-c', code))
  (site,) = python.parents[1].glob('lib/python*/site-packages')
  assert folders == [str(site / name) for name in PACKAGES]
  assert not any(extras)
  assert str(ROOT) not in path
  for folder in (*PACKAGES, 'gin_configs'):
    assert files(site / folder) == files(ROOT / folder) != set()


@pytest.mark.slow
def test_the_wheel_trains_in_another_folder(python, empty_folder):
  run(python, '-m', 'rlinf_jax.main', *JOB, '--workdir', 'run')
  result = json.loads((empty_folder / 'run' / 'result.json').read_text())
  assert result['steps'] == 3
  lines = (empty_folder / 'run' / 'metrics.jsonl').read_text().splitlines()
  assert {json.loads(line)['step'] for line in lines} == {0, 1, 2, 3}
