"""Behavior cloning: demonstrations, what is learned of them, and then."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stages import base, workflows
from stages.envs import demonstrations, push, seed_source
from stages.envs.rollouts import policy_file
from stages.learn import optimizers
from stages.models.control import flow_policy, gaussian_policy
from stages.workflows.behavior_cloning import agreement
from tiny import read

KEY = jax.random.key(0)
DEVIATION = 0.3


@pytest.fixture(scope='module')
def shown():
  """Attempts of a controller, and how many of 64 succeeded."""
  return demonstrations.collect(
    push.push(),
    push.controller,
    num_envs=32,
    noise_std=DEVIATION,
    num_episodes=64,
  )


@pytest.fixture(scope='module')
def path(shown, tmp_path_factory):
  path = tmp_path_factory.mktemp('demonstrations') / 'push.npz'
  demonstrations.write(path, shown[0])
  return path


# Demonstrations.


def test_a_controller_can_do_what_it_demonstrates(shown):
  x, succeeded = shown
  assert succeeded >= 60
  assert x.obs.shape == (succeeded * 50, 10) and x.action.shape[1] == 2
  intended = jax.vmap(push.controller)(jnp.asarray(x.obs))
  noise = x.action - intended
  assert abs(noise.mean()) < 0.01
  np.testing.assert_allclose(noise.std(), DEVIATION, rtol=0.05)


def test_only_what_succeeds_is_kept():
  still = lambda obs_O: 0.0 * obs_O[:2]
  x, succeeded = demonstrations.collect(
    push.push(horizon=5), still, num_envs=4, noise_std=0.0, num_episodes=6
  )
  assert succeeded == 0 and x.obs.shape == (0, 10)


def test_a_file_is_read_as_it_was_written(shown, path, tmp_path):
  for one, other in zip(shown[0], demonstrations.read(path), strict=True):
    np.testing.assert_array_equal(one, other)
  with pytest.raises(FileNotFoundError, match='no demonstrations at'):
    demonstrations.read(tmp_path / 'none.npz')
  for arrays, message in (
    ({'obs': np.zeros((3, 2))}, r"lacks \['action'\]"),
    ({'obs': np.zeros((3, 2)), 'action': np.zeros((2, 1))}, '3 observations'),
    ({'obs': np.zeros((0, 2)), 'action': np.zeros((0, 1))}, 'at least one'),
    ({'obs': np.zeros(3), 'obs/state': np.zeros(3)}, "'obs' and 'obs/state'"),
  ):
    np.savez(tmp_path / 'bad.npz', **arrays)
    with pytest.raises(ValueError, match=message):
      demonstrations.read(tmp_path / 'bad.npz')
  np.save(tmp_path / 'one.npy', np.zeros(3))
  (tmp_path / 'one.npy').rename(tmp_path / 'bad.npz')
  for content in (None, b'obs, action', path.read_bytes()[:-9], b''):
    if content is not None:
      (tmp_path / 'bad.npz').write_bytes(content)
    with pytest.raises(ValueError, match='bad.npz cannot be read as arrays'):
      demonstrations.read(tmp_path / 'bad.npz')


def test_a_policy_that_squashes_what_it_draws_is_refused():
  squashed = functools.partial(gaussian_policy.policy, bounding='tanh')
  with pytest.raises(
    ValueError, match="squashes its samples.*bounding = 'clip'"
  ):
    workflows.behavior_cloning(push.push(), squashed, optimizers.adamw(1e-3))


def test_batches_follow_from_seed_and_number_alone(path):
  source = demonstrations.source(str(path), batch_size=5)
  state, first = source.next(source.init(7), {})
  _, second = source.next(state, {})
  _, again = source.next(state, {})
  np.testing.assert_array_equal(second.obs, again.obs)
  assert not np.array_equal(first.obs, second.obs)
  (seed_B,) = source.held_out()
  assert len(seed_B) == 100 and seed_B[0] == seed_source.FIRST_HELD_OUT


def test_a_run_does_not_go_on_with_another_file(path, tmp_path):
  begun = demonstrations.source(str(path), batch_size=5).init(7)
  x = demonstrations.read(path)
  demonstrations.write(other := tmp_path / 'other.npz', x)
  demonstrations.source(str(other), batch_size=5).check(begun)
  demonstrations.write(other, x._replace(action=-x.action))
  made = demonstrations.source(str(other), batch_size=5)
  with pytest.raises(ValueError, match='other.npz changed since the run was'):
    made.check(begun)


# Learning.


def policy(**kwargs):
  return functools.partial(gaussian_policy.policy, width=16, **kwargs)


def test_the_loss_is_the_likelihood_after_normalizing_observations():
  workflow = workflows.behavior_cloning(
    push.push(), policy(), optimizers.adamw(1e-3)
  )
  rng = np.random.default_rng(0)
  obs = rng.normal(3, 2, (8, 10)).astype(np.float32)
  action = rng.normal(size=(8, 2)).astype(np.float32)
  before = workflow.init(KEY)
  after, info = workflow.step(before, base.Demonstration(obs, action), KEY)
  np.testing.assert_allclose(after.obs_stats.mean, obs.mean(0), rtol=1e-5)
  near = (obs - obs.mean(0)) / np.sqrt(obs.var(0) + 1e-8)
  params, keys = before.actor.params, jax.random.split(KEY, 8)
  mean = policy()(push.push()).act(params, near, keys, greedy=True).action
  z = action - np.asarray(mean)  # Deviations are one to begin with.
  want = (0.5 * z**2 + 0.5 * np.log(2 * np.pi)).sum(1).mean()
  np.testing.assert_allclose(read(info)['train/loss'], want, rtol=1e-5)


@pytest.mark.slow
def test_a_clone_of_few_gets_better_by_success_alone(tmp_path):
  env = push.push(dense=False, terminate=True)
  x, succeeded = demonstrations.collect(
    env, push.controller, num_envs=8, noise_std=DEVIATION, num_episodes=8
  )
  assert succeeded == 8
  demonstrations.write(tmp_path / 'push.npz', x)
  source = demonstrations.source(str(tmp_path / 'push.npz'), batch_size=256)
  workflow = workflows.behavior_cloning(env, policy(), optimizers.adamw(1e-2))
  state, at = workflow.init(KEY), source.init(0)
  (seeds,) = source.held_out()
  fresh = read(workflow.evaluate(state, seeds, KEY))['eval/success_once']
  for _ in range(150):
    at, batch = source.next(at, {})
    state, _ = workflow.step(state, batch, KEY)
  policy_file.export(tmp_path / 'model', workflow.params(state))
  rl = workflows.embodied_grpo(
    env,
    policy(),
    optimizers.adamw(3e-3, clip_norm=0.5),
    num_envs=256,
    group_size=8,
    num_minibatches=2,
    num_epochs=2,
    init_from=str(tmp_path / 'model'),
  )
  state = rl.init(KEY)
  cloned = read(rl.evaluate(state, seeds, KEY))['eval/success_once']
  for i in range(30):
    state, _ = rl.step(state, (), jax.random.fold_in(KEY, i))
  better = read(rl.evaluate(state, seeds, KEY))['eval/success_once']
  assert fresh < 0.05 and 0.1 < cloned < 0.8
  assert better > cloned + 0.2


@pytest.mark.parametrize('chunk', [1, 3])
def test_agreement_is_by_the_mean_loss_of_a_number_of_an_action(chunk):
  """Of flow matching, whose loss is a mean, and of a likelihood, a sum."""
  env = push.push()
  rng = np.random.default_rng(0)
  shape = (16, 2) if chunk == 1 else (16, chunk, 2)
  x = base.Demonstration(
    rng.normal(size=(16, 10)).astype(np.float32),
    rng.uniform(-1, 1, shape).astype(np.float32),
  )
  keys = jax.random.split(KEY, 16)
  flow = flow_policy.policy(env, width=16, chunk=chunk)
  # A network of zeros predicts no velocity.
  params = jax.tree.map(jnp.zeros_like, flow.init(KEY))
  score = agreement(flow)
  noise_key = jax.vmap(jax.random.split)(keys)[:, 0]
  noise = jax.vmap(lambda key: jax.random.normal(key, (2 * chunk,)))(noise_key)
  error_B = ((noise - x.action.reshape(16, -1)) ** 2).mean(1)
  got = read(score(params, x, keys))
  np.testing.assert_allclose(got['eval/loss'], error_B.mean(), rtol=1e-5)
  want = jnp.exp(-error_B).mean()
  np.testing.assert_allclose(got['eval/agreement'], want, rtol=1e-5)
  if chunk > 1:
    return
  gaussian = policy()(env)
  params = gaussian.init(KEY)
  logp_B = gaussian.evaluate(params, x.obs, x.action).logp
  got = read(agreement(gaussian)(params, x))
  want = jnp.minimum(1.0, jnp.exp(logp_B / 2)).mean()
  np.testing.assert_allclose(got['eval/agreement'], want, rtol=1e-5)
