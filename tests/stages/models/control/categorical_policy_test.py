"""A policy of choices against distributions of torch, and its choices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_envs
from stages import workflows
from stages.envs import env as env_lib
from stages.envs import push
from stages.learn import optimizers
from stages.models.control import categorical_policy, critics, gaussian_policy
import tiny

CHOICES = 3, 2
WORLD = env_lib.Env(
  None,
  None,
  jax.ShapeDtypeStruct((4,), jnp.float32),
  (0.0, 0.0),
  (2.0, 1.0),
  10,
  CHOICES,
)
B = 4096


def policy_and_params(**kwargs):
  policy = categorical_policy.policy(WORLD, width=8, **kwargs)
  params = policy.init(jax.random.key(0))
  # Weights of the last layer begin small: here they matter.
  enlarge = lambda x: x + 0.5 * jax.random.normal(jax.random.key(1), x.shape)
  return policy, jax.tree.map(enlarge, params)


def acted(policy, params, obs, **kwargs):
  keys = jax.random.split(jax.random.key(3), len(obs))
  return jax.jit(lambda p: policy.act(p, obs, keys, **kwargs))(params)


def test_log_probabilities_and_entropy_are_those_of_torch():
  torch = pytest.importorskip('torch', reason='The reference needs torch.')
  policy, params = policy_and_params()
  obs = jax.random.normal(jax.random.key(2), (16, 4))
  x = acted(policy, params, obs)
  assert x.action.shape == (16, 2) and x.action.dtype == jnp.int32
  got = policy.evaluate(params, obs, x.action)
  np.testing.assert_allclose(got.logp, x.logp, rtol=1e-5, atol=1e-6)
  hidden = np.asarray(obs)
  for name, letters in (('enter', 'OD'), ('up', 'DF')):
    weights = jax.tree.map(np.asarray, params['actor'])
    hidden = np.tanh(
      hidden @ weights[f'{name}_{letters}']
      + weights[f'{name}_bias_{letters[1]}']
    )
  logits = hidden @ weights['out_FA'] + weights['out_bias_A']
  want, entropy = 0.0, 0.0
  for i, part in enumerate(np.split(logits, [3], -1)):
    of_one = torch.distributions.Categorical(
      logits=torch.tensor(np.asarray(part))
    )
    want += of_one.log_prob(torch.tensor(np.asarray(x.action[:, i]))).numpy()
    entropy += of_one.entropy().numpy()
  np.testing.assert_allclose(got.logp, want, rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(got.entropy, entropy, rtol=1e-5, atol=1e-5)


def test_choices_are_as_frequent_as_their_probabilities():
  policy, params = policy_and_params()
  obs = jnp.broadcast_to(jnp.arange(4.0)[None], (B, 4))
  x = acted(policy, params, obs)
  every = jnp.stack(jnp.meshgrid(*map(jnp.arange, CHOICES), indexing='ij'), -1)
  every = every.reshape(-1, 2)
  probability = jnp.exp(policy.evaluate(params, obs[:6], every).logp)
  np.testing.assert_allclose(probability.sum(), 1.0, rtol=1e-5)
  count = np.zeros(CHOICES)
  np.add.at(count, tuple(np.asarray(x.action).T), 1)
  np.testing.assert_allclose(count.ravel() / B, probability, atol=4 / B**0.5)
  # The likeliest of each dimension, without chance.
  greedy = acted(policy, params, obs[:2], greedy=True).action
  np.testing.assert_array_equal(greedy[0], greedy[1])
  best = np.asarray(probability).reshape(CHOICES)
  assert greedy[0].tolist() == [best.sum(1).argmax(), best.sum(0).argmax()]


def test_a_row_does_not_depend_on_its_batch():
  policy, params = policy_and_params()
  obs = jax.random.normal(jax.random.key(2), (8, 4))
  keys = jax.random.split(jax.random.key(3), 8)
  whole = policy.act(params, obs, keys)
  part = policy.act(params, obs[3:5], keys[3:5])
  np.testing.assert_array_equal(whole.action[3:5], part.action)


def test_chunks_are_steps_of_choices():
  policy, params = policy_and_params(chunk=3)
  x = acted(policy, params, jnp.zeros((5, 4)))
  assert x.action.shape == (5, 6)
  env_action = policy.to_env_action(x.action)
  assert env_action.shape == (5, 3, 2) and env_action.dtype == jnp.float32
  assert (env_action <= jnp.array([2.0, 1.0])[None, None]).all()


def test_policies_refuse_actions_of_the_other_kind():
  with pytest.raises(ValueError, match=r'choices \(3, 2\), and these are num'):
    gaussian_policy.policy(WORLD)
  with pytest.raises(ValueError, match='use categorical_policy.policy'):
    critics.ensemble(WORLD)
  with pytest.raises(ValueError, match='use gaussian_policy.policy'):
    categorical_policy.policy(push.push())


def test_ppo_learns_to_choose():
  env = jax_envs.line_of_choices()
  workflow = workflows.embodied_ppo(
    env,
    functools.partial(categorical_policy.policy, width=8),
    optimizers.adamw(1e-2),
    num_envs=32,
    num_steps=5,
  )
  seed, key = np.arange(64, dtype=np.int32), jax.random.key(0)
  state = workflow.init(key)
  evaluate = lambda: tiny.read(workflow.evaluate(state, seed, key))
  success = lambda: evaluate()['eval/success_once']
  before = success()
  for i in range(15):
    state, _ = workflow.step(state, (), jax.random.fold_in(key, i))
  assert before < 0.7 < 0.99 < success()
