"""Fixtures of sweeps: a stand-in for a training run, curves not drawn."""

import sys

import pytest

from rlinf_jax.sweep import results
from tests.rlinf_jax.sweep import fake_main


@pytest.fixture
def fake(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(
    results, 'plot', lambda groups, metric, path: path.touch()
  )
  path = tmp_path / 'fake.py'
  path.write_text(fake_main.FAKE)
  return sys.executable, '-S', str(path)
