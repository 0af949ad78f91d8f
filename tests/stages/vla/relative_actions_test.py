"""Actions relative to the state, with openpi's transforms written by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stages import workflows
from stages.envs import episode_stats
from stages.learn import optimizers
from stages.models.control import flow_policy
from stages.vla import normalization, relative_actions
from tests.stages.vla.pi0 import pi0_policy_test as plain
from tiny import read

STATS = plain.STATS
ONE = (True, False)  # The first number of two is relative.


def delta_actions(action, state, mask):
  """openpi's DeltaActions, of chunks [N, Z, A]."""
  found = np.array(action)
  for n in range(len(found)):
    for i, is_relative in enumerate(mask):
      if is_relative:
        found[n, :, i] -= state[n, i]
  return found


def test_a_chunk_is_relative_to_the_state_when_it_is_decided():
  rng = np.random.default_rng(0)
  action, state = rng.normal(size=(3, 4, 7)), rng.normal(size=(3, 8))
  for given, mask in (
    (True, [True] * 6 + [False]),
    ((True, False, True), [True, False, True]),  # The rest is absolute.
  ):
    found = relative_actions.mask(given, 7, 8)
    assert found.tolist() == mask + [False] * (7 - len(mask))
    own = relative_actions.subtract(found, action, state)
    want = delta_actions(action, state, mask)
    np.testing.assert_allclose(own, want, atol=1e-6)
    back = own + relative_actions.offset(found, jnp.asarray(state))[:, None]
    np.testing.assert_allclose(back, action, atol=1e-6)
    single = relative_actions.subtract(found, action[:, 0], state)
    np.testing.assert_allclose(single, want[:, 0], atol=1e-6)
  assert relative_actions.mask(False, 7, 0) is None
  assert relative_actions.subtract(None, action, state) is action


@pytest.mark.parametrize(
  ('given', 'message'),
  [
    ((True,) * 3, 'has 3 entries, and actions have 2'),
    ((False, True), 'the state has 1 numbers'),
  ],
)
def test_masks_that_do_not_fit_are_refused(given, message):
  with pytest.raises(ValueError, match=message):
    relative_actions.mask(given, 2, 1)
  with pytest.raises(ValueError, match='give `norm_stats` of relative'):
    plain.policy(relative_actions=True)


def test_what_is_trained_on_is_what_is_executed():
  own = plain.policy(norm_stats=STATS, relative_actions=ONE, critic=False)
  absolute = plain.policy(norm_stats=STATS, critic=False)
  params = own.init(plain.KEY)
  _, obs = plain.ENV.init(jnp.arange(plain.B))
  keys = jax.random.split(jax.random.key(1), plain.B)
  x, y = (jax.jit(p.act)(params, obs, keys) for p in (own, absolute))
  # The model writes the same, with the same probability.
  np.testing.assert_array_equal(x.action.path, y.action.path)
  np.testing.assert_array_equal(x.logp, y.logp)
  now = jax.jit(own.evaluate)(params, x.obs, x.action)
  np.testing.assert_allclose(now.logp, x.logp, atol=1e-5)
  state = np.asarray(obs['state'])
  assert np.abs(state[:, 0]).min() > 0.01 and y.action.offset == ()
  np.testing.assert_allclose(x.action.offset, state * np.array([1.0, 0.0]))
  # A demonstration, normalized, is executed as it was, within the bounds.
  rng = np.random.default_rng(0)
  shown = rng.uniform(-1.5, 1.5, (plain.B, plain.CHUNK, 2)).astype(np.float32)
  mask = relative_actions.mask(ONE, 2, 2)
  normalize = normalization.normalizer(STATS, quantiles=False)
  learned = normalize(relative_actions.subtract(mask, shown, state))
  padded = np.pad(learned, ((0, 0), (0, 0), (0, 1))).reshape(plain.B, 1, -1)
  action = flow_policy.Denoising(
    jnp.asarray(padded), x.action.stochastic, x.action.offset
  )
  np.testing.assert_allclose(
    own.to_env_action(action), np.clip(shown, -1.0, 1.0), atol=1e-5
  )


def test_reinforcement_learning_acts_relative_to_the_state():
  make = functools.partial(
    plain.policy, norm_stats=STATS, relative_actions=ONE, frozen=plain.ALL
  )
  workflow = workflows.embodied_grpo(
    plain.ENV,
    make,
    optimizers.adamw(1e-2),
    num_envs=4,
    group_size=2,
    num_steps=2,
    episode_reward=episode_stats.episode_return,
    normalize_obs=False,
  )
  state, info = workflow.step(workflow.init(plain.KEY), (), plain.KEY)
  assert np.isfinite(read(info)['train/policy_loss'])
  assert int(state.actor.step) > 0


@pytest.mark.parametrize('relative', [ONE, False])
def test_a_state_that_would_be_normalized_twice_is_refused(relative):
  make = functools.partial(
    plain.policy, norm_stats=STATS, relative_actions=relative
  )
  workflow = workflows.embodied_grpo(
    plain.ENV,
    make,
    optimizers.adamw(1e-2),
    num_envs=4,
    group_size=2,
    num_steps=2,
  )
  with pytest.raises(ValueError, match='set normalize_obs = False'):
    jax.eval_shape(workflow.init, plain.KEY)
