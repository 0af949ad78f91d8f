"""A policy that was written is the one that is read."""

import jax
import numpy as np
import pytest

from stages.envs import push
from stages.envs.rollouts import obs_stats, policy_file
from stages.models.control import gaussian_policy


def exported(width=8):
  env = push.push()
  obs = jax.random.normal(jax.random.key(1), (20, 10))
  return {
    'policy': gaussian_policy.policy(env, width=width).init(jax.random.key(0)),
    'obs_stats': obs_stats.from_batch(obs, env.obs_spec),
  }


def test_what_is_read_is_what_was_written_to_the_bit(tmp_path):
  params = exported()
  policy_file.export(tmp_path / 'model', params)
  like = jax.eval_shape(lambda: params)
  got = policy_file.read(tmp_path / 'model', like)
  assert jax.tree.structure(got) == jax.tree.structure(params)
  jax.tree.map(np.testing.assert_array_equal, got, params)


def test_other_settings_and_missing_files_are_told(tmp_path):
  with pytest.raises(FileNotFoundError, match='There is no policy at'):
    policy_file.read(tmp_path, exported())
  policy_file.export(tmp_path, exported())
  with pytest.raises(ValueError, match=r'another policy: policy/actor/\w+ is'):
    policy_file.read(tmp_path, exported(width=16))
