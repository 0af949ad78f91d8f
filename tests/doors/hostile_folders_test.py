"""Mutations of a good folder load, or are refused in a sentence, soon."""

import contextlib
import resource
import shutil
import signal
import time

import jax
import pytest

import claims
import hostile
from stages.language import huggingface, tokens
from stages.models import adapters, lora
from tests.doors import checkpoints_test

KEY = jax.random.key(0)
good, adapter = checkpoints_test.good, checkpoints_test.adapter
FOLDERS = 170
ADAPTERS = 30


@contextlib.contextmanager
def bounded():
  """Checks that 10 CPU-seconds and 1 GiB suffice; ends what waits."""

  def late(*_):
    raise AssertionError('It waits.')

  before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  start, handler = time.process_time(), signal.signal(signal.SIGALRM, late)
  signal.alarm(120)
  try:
    yield
  finally:
    signal.alarm(0)
    signal.signal(signal.SIGALRM, handler)
  assert time.process_time() - start < 10
  after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  assert after - before < 1 << 20  # KiB.


def check(load, folder, done):
  """Loads a folder; an error must be a sentence about the folder."""
  tokens.load_tokenizer.cache_clear()
  with bounded():
    try:
      load()
    except ValueError as error:
      message = str(error)
      assert str(folder) in message, (done, message)
      assert len(message) < 3000 and '\n' not in message, (done, message)
      assert message.endswith('.'), (done, message)
      return False
  return True


@pytest.mark.parametrize('seed', claims.some(range(FOLDERS), keep=range(20)))
def test_a_mutated_model_loads_or_is_refused(seed, good, tmp_path):
  folder = shutil.copytree(good, tmp_path / 'model')
  done = hostile.mutate(folder, seed)
  check(
    lambda: huggingface.policy(str(folder), response_length=2).init(KEY),
    folder,
    done,
  )


@pytest.mark.parametrize(
  'seed', claims.some(range(1000, 1000 + ADAPTERS), keep=range(1000, 1010))
)
def test_a_mutated_adapter_loads_or_is_refused(seed, good, adapter, tmp_path):
  folder = tmp_path / 'adapter'
  folder.mkdir()
  for name in (adapters.CONFIG, adapters.TENSORS):
    shutil.copy(adapter / name, folder)
  # The mutations know the names of a model's files.
  renamed = {adapters.CONFIG: 'config.json', adapters.TENSORS: hostile.WEIGHTS}
  for name, other in renamed.items():
    (folder / name).rename(folder / other)
  done = hostile.mutate(folder, seed)
  for name, other in renamed.items():
    if (folder / other).exists() or (folder / other).is_symlink():
      (folder / other).rename(folder / name)
  settings = lora.Lora(adapter=str(folder))
  policy = lambda: huggingface.policy(
    str(good), response_length=2, lora=settings
  )
  check(lambda: policy().init(KEY), folder, done)
