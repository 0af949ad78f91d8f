"""Rates of AdamW, and optimizers of actors and critics."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from stages import metrics
from stages.learn import optimizers, train_step
from tests.stages.learn import train_step_test

float64 = train_step_test.float64  # The fixture.


def rates(optimizer, updates, dtype=jnp.float32):
  params = {'w': jnp.ones(2, dtype)}
  state, logged = train_step.init(params, optimizer), []
  apply = jax.jit(train_step.apply(optimizer))
  one = train_step.Gradient((params,), (jnp.ones(()),), {})
  for _ in range(updates):
    state, info = apply(state, one)
    logged.append(metrics.read(jax.device_get(info))[0].get('train/lr'))
  return logged


@pytest.mark.parametrize('dtype', [jnp.bfloat16, jnp.float32])
def test_the_learning_rate_is_logged_as_it_warms_up(dtype):
  np.testing.assert_allclose(
    rates(optimizers.adamw(0.4, warmup_steps=4), 6, dtype),
    [0.1, 0.2, 0.3, 0.4, 0.4, 0.4],
  )
  np.testing.assert_allclose(
    rates(optimizers.adamw(0.4, warmup_steps=1), 2), [0.4, 0.4]
  )
  np.testing.assert_allclose(
    rates(optimizers.adamw(0.4, warmup_steps=2, decay_steps=6), 6),
    [0.2, 0.4, 0.4, 0.3, 0.2, 0.1],
  )
  np.testing.assert_allclose(rates(optimizers.adamw(0.4), 2, dtype), [0.4, 0.4])


def test_an_optimizer_that_does_not_show_its_rate_logs_none():
  assert rates(optax.sgd(0.1), 1) == [None]


def test_rates_count_the_steps_of_several_updates():
  logged = rates(
    optimizers.adamw(0.4, warmup_steps=1, decay_steps=3, updates_per_step=2), 6
  )
  np.testing.assert_allclose(logged, [0.2, 0.4, 0.4, 0.3, 0.2, 0.1])


def test_a_share_of_the_steps_keeps_the_full_rate_before_it_falls():
  optimizer = optimizers.adamw(
    0.4, warmup_steps=1, constant_share=0.5, decay_steps=5
  )
  np.testing.assert_allclose(
    rates(optimizer, 6), [0.4, 0.4, 0.4, 0.4, 0.2, 0.0], atol=1e-7
  )


@pytest.mark.parametrize(
  ('settings', 'last'),
  [
    ({'warmup_steps': 4, 'decay_steps': 4}, 4),
    ({'warmup_steps': 5, 'decay_steps': 2}, 5),
    ({'decay_steps': 4, 'constant_share': 0.96}, 4),
    ({'decay_steps': 0}, 0),
  ],
)
def test_a_decay_that_leaves_no_step_still_ends_at_zero(settings, last):
  """Optax reads a decay of no updates as a constant rate."""
  found = np.array(rates(optimizers.adamw(0.4, **settings), 9))
  assert (found[:last] > 0.0).all()
  np.testing.assert_array_equal(found[last:], 0.0)


def test_adamw_decays_weights_by_its_rate():
  optimizer = optimizers.adamw(0.5, weight_decay=0.1)
  params = {'w': jnp.array([1.0, -2.0])}
  still = train_step.Gradient(({'w': jnp.zeros(2)},), (jnp.ones(()),), {})
  state, _ = train_step.apply(optimizer)(
    train_step.init(params, optimizer), still
  )
  train_step_test.close(state.params, {'w': 0.95 * params['w']})


def apart(optimizer, updates):
  """Parameters after each update, and what was told of the last."""
  params = {'actor': {'w': jnp.ones(3)}, 'critic': {'w': jnp.ones(2)}}
  state, apply = (
    train_step.init(params, optimizer),
    jax.jit(train_step.apply(optimizer)),
  )
  history = []
  for i in range(updates):
    slope = {
      'actor': {'w': jnp.arange(3.0) + i},
      'critic': {'w': jnp.array([2.0, -1.0]) * (i - 1.5)},
    }
    state, info = apply(
      state, train_step.Gradient((slope,), (jnp.ones(()),), {})
    )
    history.append(state.params)
  return history, metrics.read(jax.device_get(info))[0]


def alone(optimizer, slopes):
  """One part's parameters after Optax's updates of it alone."""
  params = {'w': jnp.ones_like(slopes[0])}
  state, history = optimizer.init(params), []
  for slope in slopes:
    change, state = optimizer.update({'w': slope}, state, params)
    params = optax.apply_updates(params, change)
    history.append(params['w'])
  return history


def test_an_actor_waits_for_its_critic():
  slow, fast = (
    optimizers.adamw(0.1, warmup_steps=2),
    optimizers.adamw(0.3, weight_decay=0.1),
  )
  both = optimizers.actor_critic(
    slow, fast, critic_warmup_steps=2, updates_per_step=2
  )
  history, info = apart(both, 7)
  ours = alone(slow, [jnp.arange(3.0) + i for i in range(4, 7)])
  theirs = alone(fast, [jnp.array([2.0, -1.0]) * (i - 1.5) for i in range(7)])
  for params in history[:4]:
    np.testing.assert_array_equal(params['actor']['w'], 1)
  # As if it began then.
  for params, want in zip(history[4:], ours, strict=True):
    np.testing.assert_allclose(params['actor']['w'], want, rtol=1e-12)
  for params, want in zip(history, theirs, strict=True):
    np.testing.assert_allclose(params['critic']['w'], want, rtol=1e-12)
  assert info['train/lr'] == pytest.approx(0.1)
  assert info['train/lr_critic'] == pytest.approx(0.3)


def test_both_learn_at_once_without_a_warm_up():
  history, _ = apart(
    optimizers.actor_critic(optimizers.adamw(0.1), optimizers.adamw(0.3)), 1
  )
  np.testing.assert_allclose(
    history[0]['actor']['w'], [1.0, 0.9, 0.9], rtol=1e-6
  )
  np.testing.assert_allclose(history[0]['critic']['w'], [1.3, 0.7], rtol=1e-6)


def test_what_has_no_critic_needs_no_optimizer_for_one():
  both = optimizers.actor_critic(optimizers.adamw(0.1), optimizers.adamw(0.3))
  with pytest.raises(ValueError, match='this policy has no critic.*actor'):
    train_step.init({'actor': jnp.ones(2)}, both)
