"""Workflows in a world that shows pictures: they learn, or say they cannot."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_envs
from stages import base, tree_paths, workflows
from stages.envs import demonstrations, drawing, push
from stages.envs.rollouts import obs_stats, policy_file
from stages.learn import optimizers
from stages.models.control import cnn, critics, gaussian_policy

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
    workflow = workflows.embodied_ppo(
      ENV, policy, optimizer, num_minibatches=2, **ROWS
    )
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
  with pytest.raises(ValueError, match='Controllers read vectors.*env`'):
    demonstrations.collect(
      ENV, push.controller, num_envs=1, noise_std=0.1, num_episodes=1
    )


def shown(env, controller_env=None, chunk=2):
  return demonstrations.collect(
    env,
    push.controller,
    num_envs=2,
    noise_std=0.1,
    num_episodes=3,
    chunk=chunk,
    controller_env=controller_env,
  )


@pytest.fixture(scope='module')
def demonstrated():
  env = push.push(image_size=12)
  return env, shown(env, push.push())


def test_pictures_are_of_the_steps_that_the_controller_made(demonstrated):
  _, (x, succeeded) = demonstrated
  vectors, as_many = shown(push.push())
  assert succeeded == as_many > 0
  assert x.obs['image']['table'].dtype == np.uint8
  assert x.obs['image']['table'].shape == (50 * succeeded, 12, 12, 3)
  np.testing.assert_array_equal(x.action, vectors.action)
  # The gripper's position is what both kinds of observations contain.
  np.testing.assert_allclose(x.obs['state'], vectors.obs[:, :2], atol=1e-6)
  table = jax.vmap(lambda obs_O: push.Table(obs_O[:2], obs_O[2:4], obs_O[4:6]))(
    jnp.asarray(vectors.obs)
  )
  draw = jax.vmap(lambda t: drawing.image(push.render(t), 12, 1.0))
  drawn = jax.jit(draw)(table)
  off = np.abs(np.int32(drawn) - np.int32(x.obs['image']['table']))
  assert off.max() <= 1  # Bytes are rounded numbers.


def test_pictures_are_written_and_read_as_bytes(demonstrated, tmp_path):
  env, (x, _) = demonstrated
  path = tmp_path / 'demonstrations.npz'
  demonstrations.write(path, x)
  again = demonstrations.read(path)
  assert jax.tree.structure(again) == jax.tree.structure(x)
  jax.tree.map(np.testing.assert_array_equal, again, x)
  source = demonstrations.source(str(path), batch_size=5)
  _, batch = source.next(source.init(0), {})
  assert batch.obs['image']['table'].shape == (5, 12, 12, 3)
  assert batch.obs['image']['table'].dtype == np.uint8
  picture = batch.obs['image']['table'][0]
  assert (x.obs['image']['table'] == picture).all((1, 2, 3)).any()
  assert len(np.unique(batch.action, axis=0)) > 2  # Of all rows.
  for other, message in (
    (
      push.push(image_size=8),
      r"'image/table' is bytes \[12, 12, 3\] in .*8, 8",
    ),
    (push.push(), "'' is absent in the demonstrations and numbers"),
  ):
    workflow = workflows.behavior_cloning(
      other, policy, optimizers.adamw(1e-3), normalize_obs=False
    )
    state = jax.eval_shape(workflow.init, jax.random.key(0))
    with pytest.raises(ValueError, match=message):
      jax.eval_shape(workflow.step, state, batch, jax.random.key(0))


def test_a_simulator_plays_the_actions_as_an_environment_does(demonstrated):
  env, (x, succeeded) = demonstrated
  again, as_many = shown(jax_envs.on_host(env), push.push())
  assert succeeded == as_many
  np.testing.assert_array_equal(again.action, x.action)
  for name in ('state', 'image/table'):
    one, other = (tree_paths.flatten(y.obs)[name] for y in (x, again))
    np.testing.assert_allclose(one, other, atol=1e-6)
