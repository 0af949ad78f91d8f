"""Parameters without dimension letters are refused when a step is traced."""

from typing import NamedTuple

from flax import linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest

from sharding import rules
from stages import base, workflows
from stages.learn import train_step
import tiny


class State(NamedTuple):
  actor: base.TrainState
  replay: dict


def state_of(params, optimizer=None, replay=None) -> State:
  """The shapes of a state whose policy has these parameters."""
  optimizer = optimizer or optax.adam(1e-3)
  return jax.eval_shape(
    lambda: State(train_step.init(params, optimizer), replay or {})
  )


class Dense(nn.Module):
  """A policy of one layer of Flax's own, whose kernel has no letters."""

  @nn.compact
  def __call__(self, x_BD):
    return nn.Dense(tiny.CONFIG.V, name='head')(x_BD)


def dense_policy() -> base.Policy:
  def init(key):
    return Dense().init(key, jnp.zeros((1, tiny.CONFIG.D)))['params']

  return tiny.policy()._replace(init=init)


def test_a_kernel_of_flax_is_refused_with_its_path_at_the_first_trace():
  workflow = workflows.grpo(
    dense_policy(), tiny.even, optax.adam(1e-3), group_size=4
  )
  message = (
    r"Parameter \.actor\.params\['head'\]\['kernel'\] of shape \(32, 16\) must "
    r'end in one letter for each of its dimensions .*kernel_DF.*every device'
  )
  with pytest.raises(ValueError, match=message):
    tiny.trace(workflow, tiny.problem(rows=8))


@pytest.mark.parametrize('name', ['kernel', 'kernel_D', 'kernel_DFW'])
def test_a_parameter_of_another_rank_than_its_name_is_refused(name):
  with pytest.raises(ValueError, match=rf"\['{name}'\] of shape \(3, 4\)"):
    rules.check_parameters(state_of({name: jnp.ones((3, 4))}))


def test_moments_without_letters_are_refused():
  state = state_of({'up_DF': jnp.ones((3, 4))})
  moments = state.actor.opt_state[0]._replace(mu={'up': jnp.ones((3, 4))})
  state = state._replace(actor=state.actor._replace(opt_state=(moments,)))
  with pytest.raises(ValueError, match=r"opt_state\[0\]\.mu\['up'\]"):
    rules.check_parameters(state)


@pytest.mark.parametrize(
  'optimizer',
  [
    optax.adam(1e-3),
    optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
    optax.adafactor(1e-3, min_dim_size_to_factor=2, momentum=0.9),
    optax.MultiSteps(optax.sgd(1e-3, momentum=0.9), 2),
  ],
  ids=['adam', 'chain', 'adafactor', 'multi-steps'],
)
def test_lettered_parameters_pass_with_their_optimizer_state(optimizer):
  params = {
    'up_DF': jnp.ones((3, 4)),
    'bias': jnp.ones(4),
    'layers': {'up_DF': jnp.ones((2, 3, 4))},
  }
  rules.check_parameters(state_of(params, optimizer))


def test_rows_of_data_need_no_letters():
  params = {'up_DF': jnp.ones((3, 4))}
  rules.check_parameters(
    state_of(params, replay={'image': jnp.ones((9, 8, 8))})
  )
