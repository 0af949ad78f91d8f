"""Correction of steps in environments that acting scores in another way."""

import functools

import jax
import numpy as np
import optax
import pytest

import jax_envs
from stages import workflows
from stages.envs import episode_stats
from stages.learn import losses
from stages.models.control import gaussian_policy
from tiny import read

KEY = jax.random.key(0)
WORKFLOWS = {
  'ppo': functools.partial(
    workflows.embodied_ppo,
    num_envs=8,
    num_steps=6,
    num_minibatches=1,
    num_epochs=1,
    value_coef=0.0,
  ),
  'grpo': functools.partial(
    workflows.embodied_grpo,
    num_envs=8,
    group_size=4,
    episode_reward=episode_stats.episode_return,
  ),
}


def step(name, off=None, **kwargs):
  """Metrics of a step; acting's log-probabilities are `off` by so much."""

  def policy(env):
    own = gaussian_policy.policy(env, width=8)
    if off is None:
      return own

    def act(*args, **kwargs):
      x = own.act(*args, **kwargs)
      return x._replace(logp=x.logp + np.float32(off))

    return own._replace(act=act, recompute_logp=True)

  # Without clipping by norm or moments: the gradient's norm is as it is.
  workflow = WORKFLOWS[name](jax_envs.line(), policy, optax.sgd(0.1), **kwargs)
  return read(workflow.step(workflow.init(KEY), (), KEY)[1])


@pytest.mark.parametrize('name', WORKFLOWS)
def test_steps_are_weighed_where_acting_rounds_otherwise(name):
  plain, off = step(name), step(name, off=-0.1)
  assert 'rollout/logprob_gap_mean' not in plain
  np.testing.assert_allclose(off['rollout/logprob_gap_mean'], 0.1, rtol=1e-4)
  np.testing.assert_allclose(off['rollout/logprob_gap_max'], 0.1, rtol=1e-4)
  # Ratios are to the learner's own log-probabilities.
  np.testing.assert_allclose(off['train/ratio_max'], 1.0, rtol=1e-5)
  # Every step weighs e^0.1 times as much.
  norm = off['train/grad_norm'] / plain['train/grad_norm']
  np.testing.assert_allclose(norm, np.exp(0.1), rtol=1e-4)


@pytest.mark.parametrize('name', WORKFLOWS)
def test_weights_of_steps_are_bounded(name):
  plain = step(name)['train/grad_norm']
  capped = step(name, off=-1.0, importance_cap=1.5)['train/grad_norm']
  np.testing.assert_allclose(capped / plain, 1.5, rtol=1e-4)
  dropped = step(name, off=-1.0, importance_bound=losses.masked)
  assert dropped['train/grad_norm'] == 0
