"""Parts of VLAs that are frozen: what is trained, and what that costs."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from planner.counting import count
from stages import base, metrics
from stages.envs import action_chunks, push
from stages.learn import optimizers, train_step
from stages.models import lora as lora_lib
from stages.vla import frozen_parts
from stages.vla.openvla import openvla_env, openvla_oft, openvla_oft_env
from stages.vla.pi0 import pi0_policy
from tests.stages.vla.openvla import openvla_env_test
from tests.stages.vla.pi0 import pi0_policy_test

B, CHUNK = 2, 2
KEY = jax.random.key(0)
VISION, ALL = ('vision',), ('vision', 'projector', 'language')


def deeper(config, more, *towers):
  """A model whose vision towers have further layers."""
  own = {k: getattr(config, k) for k in towers}
  own = {k: dataclasses.replace(x, L=x.L + more) for k, x in own.items()}
  return dataclasses.replace(config, **own)


def openvla(more=0, **settings):
  env = push.push(image_size=8)
  config = deeper(openvla_env_test.CONFIG, more, 'dino', 'siglip')
  own = {'config': config, 'instruction': (1, 5, 3), 'critic': False}
  return env, functools.partial(openvla_env.policy, **own, **settings), 1


def oft(more=0, film=False, **settings):
  env = action_chunks.chunked(push.push(image_size=8), CHUNK, 1.0)
  own = deeper(openvla_env_test.CONFIG, more, 'dino', 'siglip')
  config = openvla_oft.Config(own, Z=CHUNK, A=2, film=film)
  own = {'config': config, 'instruction': (1, 5, 3), 'critic': False}
  make = functools.partial(openvla_oft_env.policy, **own, **settings)
  return env, make, CHUNK


def pi0(adaptive, more=0, **settings):
  config = deeper(pi0_policy_test.config(adaptive), more, 'vision')
  own = {'instruction': (2, 7, 5), 'critic': False}
  own['ignored'] = ('state',) if adaptive else ()
  make = functools.partial(pi0_policy.policy, config=config, **own, **settings)
  return pi0_policy_test.ENV, make, CHUNK


MODELS = {
  'openvla': openvla,
  'openvla_oft': oft,
  'pi0': functools.partial(pi0, False),
  'pi05': functools.partial(pi0, True),
}


def demonstrations(env, Z):
  _, obs = env.init(jnp.arange(B))
  shape = (B, 2) if Z == 1 else (B, Z, 2)
  action = jax.random.uniform(jax.random.key(2), shape, minval=-1)
  return base.Demonstration(obs, action)


def loss_of(policy, x):
  """`params -> Loss`, the imitation loss of some demonstrations."""

  def loss(params):
    keys = jax.random.split(KEY, B)
    loss_B = policy.imitation_loss(params, x.obs, x.action, keys)
    return train_step.Loss((metrics.Mean(loss_B.sum(), jnp.float32(B)),), {})

  return loss


def gradient_of(policy, x):
  """`params -> Gradient` of this loss."""
  return train_step.gradient(loss_of(policy, x))


@pytest.mark.slow
@pytest.mark.parametrize('model', ['openvla', 'pi0'])
def test_frozen_towers_stay_and_the_others_learn_as_in_the_whole_model(model):
  env, make, Z = MODELS[model](frozen=VISION)
  own, x = make(env), demonstrations(env, Z)
  params = jax.jit(own.init)(KEY)
  towers = {*params[base.FROZEN]}
  assert towers == ({'vision'} if model == 'pi0' else {'dino', 'siglip'})
  gradient = jax.jit(gradient_of(own, x))(params)
  whole = MODELS[model]()[1](env)
  full = jax.jit(gradient_of(whole, x))(frozen_parts.join(params))
  (got,), (want,) = gradient.numerators, full.numerators
  assert {*got} == {*want} - towers
  # The two programs are fused differently: float32's rounding.
  for part in got:
    jax.tree.map(
      functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-6),
      got[part],
      want[part],
    )

  optimizer = optimizers.adamw(1e-2)
  state = train_step.init(params, optimizer)
  size = sum(x.size for x in jax.tree.leaves(train_step.trainable(params)))
  moments = [x for x in jax.tree.leaves(state.opt_state) if x.ndim]
  assert sum(x.size for x in moments) == 2 * size
  own_state = state._replace(params=train_step.trainable(params))
  new, _ = jax.jit(train_step.apply(optimizer))(own_state, gradient)
  for part, trained in new.params.items():
    moved = jax.tree.map(lambda a, b: (a != b).any(), params[part], trained)
    assert any(jax.tree.leaves(moved)), part


@pytest.mark.parametrize('model', MODELS)
def test_a_layer_of_a_frozen_tower_costs_a_gradient_its_forward_pass(model):
  def flops(function, more):
    env, make, Z = MODELS[model](more, frozen=VISION)
    policy = make(env)
    params = jax.eval_shape(policy.init, KEY)
    return count.work(function(policy, demonstrations(env, Z)), params).flops

  def layer(function):
    return flops(function, 1) - flops(function, 0)

  assert layer(gradient_of) == layer(loss_of) > 0


def test_film_is_trained_in_towers_that_are_frozen():
  env, make, Z = oft(film=True, frozen=VISION)
  policy = make(env)
  params = policy.init(KEY)
  (grads,) = jax.jit(gradient_of(policy, demonstrations(env, Z)))(
    params
  ).numerators
  assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(grads['film']))
  assert 'dino' in params[base.FROZEN]


@pytest.mark.parametrize(
  ('make', 'settings', 'message'),
  [
    (openvla, {'frozen': ALL}, '`frozen` names .* no other part that decides'),
    (oft, {'frozen': ALL}, '`frozen` names .* no other part that decides'),
    # A tuple of one without its comma.
    (openvla, {'frozen': ('vision')}, "'v' is no part: .* such as .'vision',"),
    (
      functools.partial(pi0, False),
      {'frozen': VISION, 'lora': lora_lib.Lora(rank=2)},
      r'with adapters .* all frozen: .* \(LORA_RANK = None in gin',
    ),
    (
      oft,
      {'frozen': VISION, 'lora': lora_lib.Lora(adapter='/adapter')},
      r'with adapters .* \(LORA_RANK = None in gin, and no LORA_ADAPTER\)',
    ),
  ],
)
def test_what_leaves_nothing_to_train_or_is_frozen_anyway_is_refused(
  make, settings, message
):
  env, policy, _ = make(**settings)
  with pytest.raises(ValueError, match=message):
    policy(env)
