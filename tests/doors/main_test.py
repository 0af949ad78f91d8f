"""Errors that a user can mend are printed alone, without a traceback."""

import pytest

from rlinf_jax import main
from rlinf_jax.envs import simulator
from rlinf_jax.runtime import base


@pytest.mark.parametrize(
  'error',
  [
    simulator.UnavailableError('LIBERO is missing: pip install it.'),
    simulator.UnavailableError(
      "LIBERO is missing: pip install it.\n  In call to configurable 'env'"
    ),
    ImportError('LIBERO is missing: pip install it.'),
    base.StageError('LIBERO is missing: pip install it.'),
    OSError('LIBERO is missing: pip install it.'),
  ],
)
def test_a_missing_package_is_one_sentence(error, monkeypatch, capsys):
  def refuse():
    raise error

  monkeypatch.setattr(main, 'workdir', refuse)
  monkeypatch.setattr(main.logging, 'set_verbosity', lambda level: None)
  monkeypatch.setattr(main.allocator, 'retain_freed_memory', lambda: None)
  monkeypatch.setenv('TRANSFORMERS_NO_ADVISORY_WARNINGS', '1')
  with pytest.raises(SystemExit) as end:
    main.main(None)
  assert end.value.code == 1
  assert capsys.readouterr().err == 'LIBERO is missing: pip install it.\n'
