"""Frozen parameters and checkpoints: what is left out, and what is seen."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlinf_jax.run_files import checkpoint
from rlinf_jax.state import frozen_weights
import saved
from stages import base
from stages.workflows.distillation import State


def checksum(x):
  return frozen_weights.checksums({'x': jnp.asarray(x)})


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16', 'int8'])
def test_a_checksum_sees_every_change(dtype):
  # Powers of two have many bits in common.
  x = np.exp2(np.random.default_rng(0).integers(-3, 4, (24, 64)))
  x = jnp.asarray(x).astype(dtype)
  assert checksum(x) == checksum(x.copy())
  changed = [
    x.at[jnp.array([3, 19])].set(x[jnp.array([19, 3])]),  # Swapped rows.
    x[:, ::-1],
    x.at[5, 6].add(1),
    -x,
  ]
  sums = [checksum(y)['x'] for y in (x, *changed)]
  assert len({*sums}) == len(sums)


def state(teacher, actor=1.0):
  """A state of distillation with an adapter and a reward model."""
  params = {'adapter': jnp.full(2, actor), base.FROZEN: jnp.full(3, 7.0)}
  frozen = {base.FROZEN: {'w': jnp.full((2, 3), teacher)}}
  judge = {base.FROZEN: {'judge': jnp.arange(4.0)}}
  return State(params, (), (), (), verifier=judge, teacher=frozen)


def test_a_checkpoint_leaves_out_teachers_and_reward_models(tmp_path):
  source = {'seed': np.asarray(3)}
  checkpoints = checkpoint.Checkpoints(tmp_path, keep=1)
  checkpoints.save(5, saved.Tree(state(2.0, actor=4.0)), source, {})
  checkpoints.close()
  written = next(tmp_path.rglob('state/*/_METADATA')).read_text()
  assert 'adapter' in written and 'judge' not in written
  assert "'w'" not in written and '"w"' not in written

  checkpoints = checkpoint.Checkpoints(tmp_path, keep=1)
  _, restored = saved.load(checkpoints, state(2.0), source)
  want = state(2.0, actor=4.0)
  assert jax.tree.structure(restored) == jax.tree.structure(want)
  jax.tree.map(np.testing.assert_array_equal, restored, want)
  with pytest.raises(ValueError, match='give it the model, teacher and reward'):
    saved.load(checkpoints, state(3.0), source)
