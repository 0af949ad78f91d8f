"""`import stages` is a library: the script of the quickstart runs as it is."""

import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


def snippet() -> str:
  page = (ROOT / 'docs' / 'quickstart.md').read_text()
  (code,) = re.findall(r'```python\n(.*?)```', page, re.S)
  return code


def run(code: str) -> str:
  done = subprocess.run(
    [sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True
  )
  assert done.returncode == 0, done.stderr
  return done.stdout


@pytest.mark.slow
def test_the_script_in_the_quickstart_learns():
  rewards = [float(line.split()[1]) for line in run(snippet()).splitlines()]
  assert len(rewards) == 40
  assert rewards[0] < 0.4 and rewards[-1] > 0.8


def test_the_script_in_the_quickstart_is_short_and_needs_stages_alone():
  assert len(snippet().splitlines()) <= 30
  imports = snippet().split('\n\n\n')[0]
  loaded = run(f'{imports}\nimport sys\nprint(*sys.modules)').split()
  for module in ('gin', 'ray', 'orbax', 'torch', 'rlinf_jax', 'planner'):
    assert module not in loaded
  assert 'stages.workflows.grpo' in loaded
