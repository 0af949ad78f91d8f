import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]

# A module that is None cannot be imported.
IMPORT = """
import importlib, pkgutil, sys
name, *blocked = sys.argv[1:]
sys.modules.update(dict.fromkeys(blocked))
module = importlib.import_module(name)
for child in pkgutil.walk_packages(getattr(module, '__path__', ()), name + '.'):
  importlib.import_module(child.name)
"""


def python(*args):
  return subprocess.run(
    [sys.executable, *args], cwd=ROOT, capture_output=True, text=True
  )


def test_packages_import_only_downwards():
  lint = 'import importlinter.cli as cli; cli.lint_imports_command()'
  done = python('-c', lint, '--no-cache')
  assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize('module', ['planner.ir.plan', 'planner.lower.program'])
def test_planning_runs_without_jax(module):
  done = python('-c', IMPORT, module, 'jax', 'jaxlib', 'flax', 'optax', 'chex')
  assert done.returncode == 0, done.stderr


@pytest.mark.parametrize('floor', ['planner', 'stages', 'sharding'])
def test_lower_packages_import_without_gin_ray_and_torch(floor):
  done = python('-c', IMPORT, floor, 'gin', 'ray', 'torch', 'wandb')
  assert done.returncode == 0, done.stderr
