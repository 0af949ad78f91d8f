"""Value and reward models in packed rows: the results without packing."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stages import base, workflows
from stages.language import value_model
from tests.rlinf_jax.runtime.plans import invariance_test
import tiny

GROUP = 4
CONFIG = dataclasses.replace(tiny.CONFIG, dtype='float64')
HEAD = {'value_D': np.linspace(-1.0, 1.0, CONFIG.D)}
MODELS = {'own': value_model.own_trunk, 'policy': value_model.head}


def params_of(trunk):
  """Parameters whose head is not zero, so that values differ."""
  params = tiny.policy('float64').init(jax.random.key(0))
  if trunk == 'policy':
    return params | {base.CRITIC: HEAD}
  own = value_model.own_trunk(CONFIG).init(jax.random.key(0))
  return own | HEAD


def completions(groups=4, seed=0):
  """Prompts, completions and a mask; some completions have no token."""
  rng = np.random.default_rng(seed)
  prompt = jax.tree.map(
    lambda x: np.repeat(x, GROUP, 0), tiny.problem(groups, seed=seed).prompt
  )
  B, T = groups * GROUP, tiny.LENGTH
  length_B1 = rng.integers(0, T + 1, (B, 1))
  length_B1[:2, 0] = 0, T
  mask_BT = (np.arange(T)[None] < length_B1).astype(np.float32)
  return prompt, rng.integers(1, CONFIG.V, (B, T), np.int32), mask_BT


def values_and_slopes(model, params, given):
  prompt, action_BT, mask_BT = given
  weight_BT = np.random.default_rng(1).normal(size=mask_BT.shape)

  @jax.jit
  @functools.partial(jax.grad, has_aux=True)
  def run(params):
    value_BT = model.value(
      params, prompt, action_BT, group_size=GROUP, mask=mask_BT
    )
    value_BT = jnp.where(mask_BT > 0, value_BT, 0.0)
    return (weight_BT * value_BT).sum(), value_BT

  return run(params)


@pytest.mark.usefixtures('in_float64')
@pytest.mark.parametrize('trunk', MODELS)
def test_packing_changes_only_the_rounding_of_values(trunk):
  given, params = completions(), params_of(trunk)
  (want_slope, want), (slope, got) = (
    values_and_slopes(MODELS[trunk](CONFIG, packed_tokens=n), params, given)
    for n in (None, 15)
  )
  assert np.std(want) > 0.1
  np.testing.assert_allclose(got, want, rtol=0, atol=1e-12)
  assert invariance_test.apart(slope, want_slope) <= 1e-10


@pytest.mark.usefixtures('in_float64')
def test_packing_changes_only_the_rounding_of_scores():
  given, params = completions(), params_of('own')
  # Prompts of 5 tokens, completions of 6, and no token to spare.
  models = [value_model.own_trunk(CONFIG, packed_tokens=n) for n in (None, 11)]
  want_B, got_B = (
    jax.jit(value_model.score_completions(model))(params, *given)
    for model in models
  )
  assert np.std(want_B) > 0.1
  np.testing.assert_allclose(got_B, want_B, rtol=0, atol=1e-12)
  model = value_model.own_trunk(CONFIG, packed_tokens=10)
  with pytest.raises(ValueError, match='have 11 together: set packed_tokens'):
    value_model.score_completions(model)(params, *given)


@pytest.mark.usefixtures('in_float64')
def test_a_value_model_that_packs_needs_a_mask():
  prompt, action_BT, _ = completions()
  model = value_model.head(CONFIG, packed_tokens=15)
  with pytest.raises(ValueError, match='no mask says which of their values'):
    model.value(params_of('policy'), prompt, action_BT)


@pytest.mark.slow
@pytest.mark.usefixtures('in_float64')
@pytest.mark.parametrize('trunk', MODELS)
def test_a_step_of_ppo_with_packing_learns_the_same(trunk):
  infos, states = [], []
  for packed_tokens in None, 15:
    ppo = workflows.ppo(
      tiny.policy('float64', packed_tokens=packed_tokens),
      invariance_test.even,
      MODELS[trunk](CONFIG, packed_tokens=packed_tokens),
      invariance_test.KEEP,
      invariance_test.KEEP,
      group_size=GROUP,
      num_minibatches=2,
    )
    state = invariance_test.begin(ppo)
    state, info = ppo.step(state, tiny.problem(8), jax.random.key(3))
    states.append(state)
    infos.append(tiny.read(info))
  assert invariance_test.apart(*(x.actor.opt_state for x in states)) <= 1e-10
  if trunk == 'own':
    assert invariance_test.apart(*(x.critic.opt_state for x in states)) <= 1e-10
  for name, number in infos[0].items():
    if name != 'rollout/padding':
      np.testing.assert_allclose(
        infos[1][name], number, rtol=1e-10, atol=1e-12, err_msg=name
      )
