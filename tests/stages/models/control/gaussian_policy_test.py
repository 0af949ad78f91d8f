"""A robot's policy against distributions of torch, and its bounds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stages.envs import action_range, push
from stages.envs import env as env_lib
from stages.models.control import gaussian_policy

torch = pytest.importorskip('torch', reason='Reference densities need torch.')
distributions = torch.distributions

LOW, HIGH = (-1.0, 0.0, -3.0), (1.0, 2.0, 5.0)
WORLD = env_lib.Env(
  None, None, jax.ShapeDtypeStruct((4,), jnp.float32), LOW, HIGH, 10
)
B = 64


pytestmark = pytest.mark.usefixtures('in_float64')


def policy_and_params(bound):
  policy = gaussian_policy.policy(WORLD, width=8, bounding=bound, init_std=0.7)
  params = policy.init(jax.random.key(0))
  # Weights of the last layer begin small: here they matter.
  enlarge = lambda x: x + 0.3 * jax.random.normal(jax.random.key(1), x.shape)
  return policy, jax.tree.map(enlarge, params)


def acted(policy, params, **kwargs):
  obs = jax.random.normal(jax.random.key(2), (B, 4))
  keys = jax.random.split(jax.random.key(3), B)
  return policy.act(params, obs, keys, **kwargs)


def reference(policy, params, x, bound):
  """The same distribution in torch, over commands where they are squashed."""
  mean = np.array(acted(policy, params, greedy=True).action)
  deviation = np.exp(np.asarray(params['actor']['log_std_A']))
  normal = distributions.Normal(
    torch.tensor(mean), torch.tensor(np.broadcast_to(deviation, mean.shape))
  )
  if bound == 'clip':
    return normal
  low, high = torch.tensor(LOW), torch.tensor(HIGH)
  return distributions.TransformedDistribution(
    normal,
    [
      distributions.TanhTransform(),
      distributions.AffineTransform((low + high) / 2, (high - low) / 2),
    ],
  )


def test_a_gaussians_log_probability_and_entropy_are_those_of_torch():
  policy, params = policy_and_params('clip')
  x = acted(policy, params)
  want = reference(policy, params, x, 'clip')
  logp = want.log_prob(torch.tensor(np.array(x.action))).sum(-1).numpy()
  np.testing.assert_allclose(x.logp, logp, rtol=1e-10)
  now = policy.evaluate(params, x.obs, x.action)
  np.testing.assert_allclose(now.logp, logp, rtol=1e-10)
  np.testing.assert_allclose(
    now.entropy, want.entropy().sum(-1).numpy(), rtol=1e-10
  )


def test_a_squashed_gaussians_log_probability_is_that_of_torch():
  policy, params = policy_and_params('tanh')
  x = acted(policy, params)
  want = reference(policy, params, x, 'tanh')
  command = torch.tensor(np.array(policy.to_env_action(x.action)))
  logp = want.log_prob(command).sum(-1).numpy()
  np.testing.assert_allclose(x.logp, logp, rtol=1e-8)
  now = policy.evaluate(params, x.obs, x.action)
  np.testing.assert_allclose(now.logp, logp, rtol=1e-8)


def test_a_squashed_density_is_finite_and_exact_where_tanh_is_one():
  far = jnp.array([[10.0, -30.0, 0.0]])
  low, high = jnp.array(LOW), jnp.array(HIGH)
  slope = action_range.log_slope(far, low, high)[0].sum()
  # log(1 − tanh² x) = log 4 − 2|x| + O(e^−2|x|), and 0 at 0.
  want = (np.log(4) - 20) + (np.log(4) - 60) + np.log(1 * 1 * 4)
  np.testing.assert_allclose(slope, want, rtol=1e-9)


@pytest.mark.parametrize('bound', ['clip', 'tanh'])
def test_commands_stay_within_the_space_and_reach_its_ends(bound):
  policy, _ = policy_and_params(bound)
  low, high = np.array(LOW), np.array(HIGH)
  far = jnp.array([[-50.0] * 3, [50.0] * 3, [0.0] * 3])
  env_action = policy.to_env_action(far)
  np.testing.assert_allclose(
    env_action, [low, high, (low + high) / 2], atol=1e-12
  )
  drawn = policy.to_env_action(
    3 * jax.random.normal(jax.random.key(0), (99, 3))
  )
  assert (drawn >= low[None]).all() and (drawn <= high[None]).all()


@pytest.mark.parametrize('bound', ['clip', 'tanh'])
def test_a_greedy_policy_does_the_same_whatever_the_key(bound):
  policy, params = policy_and_params(bound)
  obs = jax.random.normal(jax.random.key(2), (B, 4))
  actions = [
    policy.act(
      params, obs, jax.random.split(jax.random.key(i), B), greedy=True
    ).action
    for i in range(2)
  ]
  np.testing.assert_array_equal(*actions)


def test_a_rows_draw_is_its_keys_alone():
  policy, params = policy_and_params('clip')
  every = acted(policy, params)
  keys = jax.random.split(jax.random.key(3), B)[5:9]
  few = policy.act(params, every.obs[5:9], keys)
  np.testing.assert_allclose(few.action, every.action[5:9], rtol=1e-12)


def test_steps_may_have_any_dimensions_ahead():
  policy, params = policy_and_params('clip')
  x = acted(policy, params)
  one = policy.evaluate(params, x.obs, x.action)
  square = policy.evaluate(
    params, x.obs.reshape(8, 8, 4), x.action.reshape(8, 8, 3)
  )
  close = lambda a, b: np.testing.assert_allclose(a.reshape(-1), b, rtol=1e-12)
  jax.tree.map(close, square, one)


def test_weights_are_orthogonal_and_the_last_layer_of_the_actor_small():
  params = gaussian_policy.policy(push.push()).init(jax.random.key(0))
  actor = params['actor']
  up = np.asarray(actor['up_DF'])
  np.testing.assert_allclose(up.T @ up, 2 * np.eye(64), atol=1e-6)
  assert np.abs(actor['out_FA']).max() <= 0.01
  out = np.asarray(params['critic']['out_F'])
  np.testing.assert_allclose(np.linalg.norm(out), 1.0, rtol=1e-6)


def test_a_world_that_shows_words_is_refused():
  obs = {'instruction': jax.ShapeDtypeStruct((128,), jnp.uint8)}
  with pytest.raises(ValueError, match='reads images.* and float vectors'):
    gaussian_policy.policy(WORLD._replace(obs_spec=obs))


def test_bounds_of_another_name_are_refused():
  with pytest.raises(
    ValueError, match="must be 'clip' or 'tanh', and is 'cut'"
  ):
    gaussian_policy.policy(WORLD, bounding='cut')


@pytest.mark.parametrize(
  'range_', [(-np.inf, np.inf), (0.0, np.inf), (1.0, -1.0), (np.nan, 1.0)]
)
def test_actions_without_a_range_are_refused(range_):
  """They would be NaN."""
  low, high = ((-1.0, x) for x in range_)
  with pytest.raises(ValueError, match='Number 1 of an action .* no range'):
    gaussian_policy.policy(
      WORLD._replace(action_low=low, action_high=(1.0, high[1]))
    )


def test_as_many_lower_as_upper_bounds_are_required():
  with pytest.raises(ValueError, match='have 1 lower and . upper bounds'):
    gaussian_policy.policy(WORLD._replace(action_low=(-1.0,)))
