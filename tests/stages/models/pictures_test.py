"""Workflows in a world that shows pictures: they learn, or say they cannot."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stages import base, workflows
from stages.envs import demonstrations, push
from stages.envs.rollouts import obs_stats
from stages.learn import optimizers
from stages.models import cnn, critics, gaussian_policy, policy_file

ENV = push.push(image_size=12, horizon=2)
policy = functools.partial(
  gaussian_policy.policy,
  width=4,
  camera_encoder=cnn.Config((3,), (4,), (4,), None),
)
ROWS = {'num_envs': 4, 'num_steps': 2}


def shapes(workflow, batch=()):
  """Of the state before and after a step, traced and not compiled."""
  state = jax.eval_shape(workflow.init, jax.random.key(0))
  after = jax.eval_shape(workflow.step, state, batch, jax.random.key(0))[0]
  return state, after


@pytest.mark.parametrize('name', ['ppo', 'grpo', 'behavior_cloning'])
def test_a_step_in_pictures_leaves_a_state_of_the_same_shapes(name):
  optimizer, batch = optimizers.adamw(1e-3), ()
  if name == 'ppo':
    workflow = workflows.ppo(ENV, policy, optimizer, num_minibatches=2, **ROWS)
  elif name == 'grpo':
    workflow = workflows.embodied_grpo(
      ENV, policy, optimizer, group_size=2, kl_coef=0.1, **ROWS
    )
  else:
    workflow = workflows.behavior_cloning(ENV, policy, optimizer)
    rows = lambda x: jax.ShapeDtypeStruct((4, *x.shape), x.dtype)
    batch = base.Demonstration(
      jax.tree.map(rows, ENV.obs_spec),
      jax.ShapeDtypeStruct((4, 2), jnp.float32),
    )
  before, after = shapes(workflow, batch)
  assert before == after
  scale = after.obs_stats.mean
  assert scale['image'] == {'table': None} and scale['state'].shape == (2,)
  assert 'image_table' in after.actor.params['encoder']


def test_a_policy_of_pictures_is_exported_and_begun_with(tmp_path):
  fresh = {
    'policy': jax.jit(policy(ENV).init)(jax.random.key(0)),
    'obs_stats': obs_stats.init(ENV.obs_spec),
  }
  policy_file.export(tmp_path, fresh)
  again = policy_file.start(tmp_path, jax.tree.map(jnp.zeros_like, fresh))
  assert jax.tree.structure(again) == jax.tree.structure(fresh)
  jax.tree.map(np.testing.assert_array_equal, again, fresh)


def test_who_cannot_learn_from_pictures_says_so():
  with pytest.raises(ValueError, match='These critics read vectors'):
    workflows.sac(
      ENV,
      gaussian_policy.policy,
      critics.ensemble,
      optimizers.adamw(1e-3),
      capacity=8,
      **ROWS,
    )
  with pytest.raises(
    ValueError, match='Demonstrations hold vector observations'
  ):
    demonstrations.collect(
      ENV, push.controller, num_envs=1, noise_std=0.1, num_episodes=1
    )
