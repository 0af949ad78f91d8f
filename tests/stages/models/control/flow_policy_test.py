"""A flow-matching policy: its samples, their densities and what it imitates."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stages import base, workflows
from stages.envs import demonstrations, push
from stages.envs import env as env_lib
from stages.learn import optimizers
from stages.models.control import flow_matching, flow_policy
from tiny import read

B, CHUNK, K = 16, 3, 4
LOW, HIGH = (-1.0, 0.0), (1.0, 3.0)
ENV = env_lib.Env(
  None, None, jax.ShapeDtypeStruct((5,), jnp.float32), LOW, HIGH, 10
)
KINDS = {
  'sde': flow_policy.Exploration(),
  'noise': flow_policy.Exploration('noise'),
  'mean': flow_policy.Exploration('noise', mean_over_steps=True),
}


@functools.cache
def policy_and_params(kind):
  policy = flow_policy.policy(
    ENV, width=8, chunk=CHUNK, num_steps=K, exploration=KINDS[kind]
  )
  # Weights of the last layer begin small: here they matter.
  enlarge = lambda x: x + 0.3 * jax.random.normal(jax.random.key(1), x.shape)
  return policy, jax.tree.map(enlarge, policy.init(jax.random.key(0)))


@functools.cache
def acted(kind, greedy=False, seed=3):
  policy, params = policy_and_params(kind)
  obs = jax.random.normal(jax.random.key(2), (B, 5))
  keys = jax.random.split(jax.random.key(seed), B)
  return policy.act(params, obs, keys, greedy=greedy)


@pytest.mark.parametrize('kind', KINDS)
def test_actions_are_scored_as_they_were_recorded(kind):
  policy, params = policy_and_params(kind)
  x = acted(kind)
  now = jax.jit(policy.evaluate)(params, x.obs, x.action)
  np.testing.assert_allclose(now.logp, x.logp, atol=1e-5)
  assert now.value.shape == now.entropy.shape == (B,)
  # With other leading dimensions, too.
  fold = lambda x: x.reshape(4, B // 4, *x.shape[1:])
  square = policy.evaluate(params, fold(x.obs), jax.tree.map(fold, x.action))
  close = lambda a, b: np.testing.assert_allclose(a.reshape(-1), b, atol=1e-5)
  jax.tree.map(close, square, now)


def test_one_step_of_flow_sde_is_stochastic_and_others_follow_the_velocity():
  policy, params = policy_and_params('sde')
  x = acted('sde')
  field = flow_policy.Velocity(D=8, F=8, spread=False)
  path, (index,) = np.asarray(x.action.path), x.action.stochastic.T
  assert {*np.asarray(index)} == {*range(K)}
  for k in range(K):
    v, _ = field.apply(
      {'params': params['actor']}, x.obs, path[:, k], jnp.full(B, 1 - k / K)
    )
    off = np.abs(path[:, k] - v / K - path[:, k + 1]).max(1)
    np.testing.assert_array_equal(off > 1e-4, index == k)
    mean, std = flow_matching.sde_step(path[:, k], v, k, K, 0.5)
    logp = jax.scipy.stats.norm.logpdf(path[:, k + 1], mean, std).sum(1)
    here = np.asarray(index == k)
    np.testing.assert_allclose(x.logp[here], logp[here], atol=1e-4)


def test_flow_noise_is_scored_by_all_steps_and_the_initial_noise():
  _, params = policy_and_params('noise')
  x = acted('noise')
  field = flow_policy.Velocity(D=8, F=8, spread=True)
  path, logpdf = x.action.path, jax.scipy.stats.norm.logpdf
  logp = logpdf(path[:, 0]).sum(1)
  for k in range(K):
    v, spread = field.apply(
      {'params': params['actor']}, x.obs, path[:, k], jnp.full(B, 1 - k / K)
    )
    std = 0.08 * 2.0 ** (0.5 * (1 + jnp.tanh(spread)))  # From 0.08 to 0.16.
    logp += logpdf(path[:, k + 1], path[:, k] - v / K, std).sum(1)
  np.testing.assert_allclose(x.logp, logp, rtol=1e-4, atol=1e-4)
  np.testing.assert_allclose(acted('mean').logp, logp / (K + 1), atol=1e-4)


@functools.cache
def density_of_a_number(kind, num_steps):
  """`path, stochastic -> density`, of one action of one number."""
  env = ENV._replace(action_low=(-1.0,), action_high=(1.0,))
  policy = flow_policy.policy(
    env, width=4, num_steps=num_steps, exploration=KINDS[kind], critic=False
  )
  enlarge = lambda x: x + 0.3 * jax.random.normal(jax.random.key(1), x.shape)
  params = jax.tree.map(enlarge, policy.init(jax.random.key(0)))

  @jax.jit
  def logp(path, stochastic):
    obs = jnp.broadcast_to(jnp.linspace(-1.0, 1.0, 5), (*path.shape[:-2], 5))
    action = flow_policy.Denoising(path, stochastic)
    return policy.evaluate(params, obs, action).logp

  return lambda *action: np.exp(np.asarray(logp(*action), np.float64))


def test_the_density_of_flow_sdes_step_integrates_to_one():
  grid = np.linspace(-6.0, 6.0, 601, dtype=np.float32)  # Deviations from 0.14.
  path = np.full((K, len(grid), K + 1, 1), 0.3, np.float32)
  for k in range(K):  # The start of the step is given, and its end varies.
    path[k, :, k + 1, 0] = grid
  stochastic = np.broadcast_to(
    np.arange(K)[:, None, None], (*path.shape[:2], 1)
  )
  density = density_of_a_number('sde', K)(path, stochastic)
  # Sums of smooth functions on even grids are exact, but for float32.
  np.testing.assert_allclose(
    density.sum(1) * (grid[1] - grid[0]), 1.0, rtol=2e-5
  )


def test_the_density_of_flow_noises_path_integrates_to_one():
  # Spacings of at most the deviations, which are 1 and from 0.08.
  initial = np.linspace(-6.0, 6.0, 25, dtype=np.float32)
  move = np.linspace(-2.0, 2.0, 51, dtype=np.float32)
  moves = np.meshgrid(initial, move, move, indexing='ij')
  path = np.cumsum(np.stack(moves, axis=-1), axis=-1).reshape(-1, 3, 1)
  stochastic = np.broadcast_to(np.arange(2), (len(path), 2))
  density = density_of_a_number('noise', 2)(path, stochastic)
  cell = (initial[1] - initial[0]) * (move[1] - move[0]) ** 2
  np.testing.assert_allclose(density.sum() * cell, 1.0, rtol=2e-5)


@pytest.mark.parametrize('kind', ['sde', 'noise'])
def test_greedy_actions_follow_the_velocity_from_the_rows_noise(kind):
  policy, params = policy_and_params(kind)
  x, sampled = acted(kind, greedy=True), acted(kind)
  path = x.action.path
  np.testing.assert_array_equal(path[:, 0], sampled.action.path[:, 0])
  field = flow_policy.Velocity(D=8, F=8, spread=kind == 'noise')
  velocity = lambda x_BA, t_B: field.apply(
    {'params': params['actor']}, x.obs, x_BA, t_B
  )[0]
  want = path[:, 0]
  for k in range(K):
    want -= velocity(want, jnp.full(len(want), 1.0 - k / K)) / K
  np.testing.assert_allclose(path[:, -1], want, atol=1e-5)
  assert np.abs(path[:, -1] - sampled.action.path[:, -1]).max() > 0.01


@pytest.mark.parametrize('kind', ['sde', 'noise'])
def test_a_rows_action_is_its_keys_alone(kind):
  policy, params = policy_and_params(kind)
  every, some = acted(kind), slice(5, 9)
  keys = jax.random.split(jax.random.key(3), B)[some]
  few = policy.act(params, every.obs[some], keys)
  for a, b in zip(
    jax.tree.leaves((few.action, few.logp)),
    jax.tree.leaves((every.action, every.logp)),
    strict=True,
  ):
    np.testing.assert_allclose(a, b[some], atol=1e-5)


def test_env_actions_are_chunks_within_bounds():
  policy, _ = policy_and_params('sde')
  path = jnp.array([[[9.0] * 6, [-50, 50, 0, 0.5, 50, -50]]])
  env_action = policy.to_env_action(
    flow_policy.Denoising(path, jnp.zeros((1, 1), int))
  )
  want = [[-1.0, 3.0], [0.0, 2.25], [1.0, 0.0]]
  np.testing.assert_allclose(env_action, [want], atol=1e-6)


def test_unknown_exploration_is_refused():
  with pytest.raises(ValueError, match="'sde' or 'noise', and is 'ode'"):
    flow_policy.Exploration('ode')
  with pytest.raises(ValueError, match='make `min_std` the smaller'):
    flow_policy.Exploration('noise', min_std=0.2)


def test_a_chunk_is_an_action_and_those_that_follow_it():
  action_BTA = np.arange(12.0).reshape(2, 6, 1)
  chunks = demonstrations.following(action_BTA, np.array([6, 3]), 3)[..., 0]
  np.testing.assert_array_equal(chunks[0, :2], [[0, 1, 2], [1, 2, 3]])
  np.testing.assert_array_equal(chunks[0, 4:], [[4, 5, 5], [5, 5, 5]])
  # The second episode has three steps.
  np.testing.assert_array_equal(chunks[1, 1:3], [[7, 8, 8], [8, 8, 8]])


def test_cloning_minimizes_the_flow_matching_loss_by_keys_of_rows():
  workflow = workflows.behavior_cloning(
    push.push(),
    functools.partial(flow_policy.policy, width=8, chunk=2),
    optimizers.adamw(1e-2),
    normalize_obs=False,
  )
  rng = np.random.default_rng(0)
  shapes = (64, 10), (64, 2, 2)
  batch = base.Demonstration(
    *(rng.normal(size=shape).astype(np.float32) for shape in shapes)
  )
  state, losses = workflow.init(jax.random.key(0)), []
  for i in range(2):
    _, info = workflow.step(state, batch, jax.random.key(i))
    losses.append(read(info)['train/loss'])
  # The velocity begins near zero: the loss is E(ε − a)² = 2, of other draws.
  assert losses[0] != losses[1]
  np.testing.assert_allclose(losses, 2.0, rtol=0.2)
