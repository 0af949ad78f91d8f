"""Errors that a user can mend are printed alone, without a traceback."""

from absl import flags
from absl.testing import flagsaver
import pytest

from rlinf_jax import command_line, main
from rlinf_jax.envs import simulator
from rlinf_jax.runtime import base
from rlinf_jax.sweep import sweep  # noqa: F401 (It has flags.)


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


@pytest.mark.parametrize(
  'flag', ['plan_seconds=nan', 'point_minutes=nan', 'point_minutes=0']
)
@flagsaver.flagsaver
def test_a_time_that_is_no_number_is_refused(flag):
  with pytest.raises(flags.Error, match='It must be a number'):
    command_line.parse_flags(['main', f'--{flag}'])
