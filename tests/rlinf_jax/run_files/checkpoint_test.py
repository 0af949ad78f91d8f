"""Checkpoints that cannot be written, and what is reported of them."""

import errno
import logging
import os

from absl import logging as absl_logging
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlinf_jax.run_files import checkpoint
from rlinf_jax.runtime.base import ProcessDiedError
import saved

SOURCE = {'at': np.zeros(1)}


class Failing(saved.Tree):
  """Writes a state; then an error is raised."""

  def __init__(self, error):
    super().__init__({'w': jnp.ones(3)})
    self.error = error

  def start_writing(self, folder):
    finish = super().start_writing(folder)

    def fail():
      finish()
      raise self.error

    return fail


@pytest.mark.parametrize('keep', [1, 2])
def test_an_abandoned_checkpoint_hides_a_death_and_no_other_failure(
  tmp_path, keep
):
  """A process that ended because a disk was full is not the news."""
  files = checkpoint.Checkpoints(tmp_path, keep)
  files.save(1, saved.Tree({'w': jnp.ones(3)}), SOURCE, {})
  files.save(2, Failing(ProcessDiedError('It has died.')), SOURCE, {})
  files.abandon()
  assert files.latest() == 1
  full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
  files.save(2, Failing(full), SOURCE, {})
  with pytest.raises(
    checkpoint.CheckpointError, match='No space left.*step 1 is intact'
  ) as info:
    files.abandon()
  assert info.value.__cause__ is full
  files.abandon()  # Nothing is being written any more.
  assert files.steps() == [1]
  files.close()


def test_an_error_without_words_is_named(tmp_path):
  files = checkpoint.Checkpoints(tmp_path, 1)
  files.save(1, Failing(MemoryError()), SOURCE, {})
  with pytest.raises(checkpoint.CheckpointError, match=r'\(MemoryError\(\)\)'):
    files.wait()
  files.close()


@pytest.mark.parametrize('source', [np.arange(3), np.array(2), 5, ()])
def test_a_source_may_have_one_array_or_nothing_as_its_state(tmp_path, source):
  tree = {'w': jnp.ones(3)}
  files = checkpoint.Checkpoints(tmp_path, 1)
  files.save(1, saved.Tree(tree), source, {})
  files.wait()
  found = files.load(tree, None, source).source
  files.close()
  jax.tree.map(np.testing.assert_array_equal, found, source)
  assert jax.tree.structure(found) == jax.tree.structure(source)


def test_another_source_is_refused_and_its_state_is_read_all_the_same(tmp_path):
  """An evaluation needs no source of the run whose policy it reads."""
  tree = {'w': jnp.ones(3)}
  files = checkpoint.Checkpoints(tmp_path, 1)
  files.save(1, saved.Tree(tree), {'batch': np.array(1)}, {})
  files.wait()
  with pytest.raises(
    ValueError, match='whose state is `batch`, and is `at`, `batch` now: give'
  ):
    files.load(tree, None, {'batch': np.array(0), 'at': np.zeros(3)})
  assert saved.whole(files.state(tree, None), tree)['w'].tolist() == [1, 1, 1]
  files.close()


def test_orbax_logs_nothing_of_checkpoints_that_are_read_or_fail(
  tmp_path, caplog
):
  """In programs of others, too, whose own lines stay."""
  caplog.set_level(logging.INFO, logger='absl')
  tree = {'w': jnp.ones(3)}
  files = checkpoint.Checkpoints(tmp_path, 1)
  files.save(1, saved.Tree(tree), SOURCE, {})
  files.wait()
  files.save(2, Failing(OSError('full')), SOURCE, {})
  with pytest.raises(checkpoint.CheckpointError, match='full'):
    files.wait()
  files.close()
  files = checkpoint.Checkpoints(tmp_path, 1, read_only=True)
  files.load(tree, None, SOURCE)
  files.close()
  absl_logging.warning('mine')
  assert [x.getMessage() for x in caplog.records] == ['mine']
