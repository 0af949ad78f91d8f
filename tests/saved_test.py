"""A policy that was written is the one that is read."""

import jax
import numpy as np
import pytest

from stages import normalise, robot
from stages.models import saved
from stages.worlds import push


def exported(width=8):
  world = push.push()
  obs = jax.random.normal(jax.random.key(1), (20, 10))
  return {
    'policy': robot.policy(world, width=width).init(jax.random.key(0)),
    'scale': normalise.of(obs, world.obs),
  }


def test_what_is_read_is_what_was_written_to_the_bit(tmp_path):
  params = exported()
  saved.export(tmp_path / 'model', params)
  like = jax.eval_shape(lambda: params)
  made = saved.read(tmp_path / 'model', like)
  assert jax.tree.structure(made) == jax.tree.structure(params)
  jax.tree.map(np.testing.assert_array_equal, made, params)


def test_other_settings_and_missing_files_are_told(tmp_path):
  with pytest.raises(FileNotFoundError, match='There is no policy at'):
    saved.read(tmp_path, exported())
  saved.export(tmp_path, exported())
  with pytest.raises(ValueError, match=r'another policy: policy/actor/\w+ is'):
    saved.read(tmp_path, exported(width=16))
