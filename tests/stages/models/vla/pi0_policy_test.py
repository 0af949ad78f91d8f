"""π0 and π0.5 as policies in the pushing world, with pictures."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stages import base, workflows
from stages.envs import action_chunks, episode_stats, push
from stages.learn import optimizers
from stages.models.control import flow_policy
from stages.models.vision import vit
from stages.models.vla import pi0, pi0_files, pi0_policy
from tiny import read

SIZE, CHUNK, B = 16, 2, 4
ENV = action_chunks.chunked(push.push(horizon=4, image_size=SIZE), CHUNK, 0.9)
KEY = jax.random.key(0)


def config(adaptive=False, **kwargs):
  sizes = {'L': 1, 'H': 2, 'K': 1, 'W': 8, 'F': 16, 'init_stddev': 0.3}
  return pi0.Config(
    vit.Config(image_size=SIZE, patch_size=8, D=8, L=1, H=2, F=8),
    pi0.GEMMA(V=16, D=16, **sizes),
    pi0.GEMMA(V=1, D=12, **sizes),
    **{'Z': CHUNK, 'A': 3, 'O': 4, 'adaptive': adaptive} | kwargs,
  )


def policy(env=ENV, adaptive=False, ignored=None, **kwargs):
  if ignored is None:
    ignored = ('state',) if adaptive else ()
  return pi0_policy.policy(
    env, config(adaptive), instruction=(2, 7, 5), ignored=ignored, **kwargs
  )


@functools.cache
def acted(adaptive):
  made = policy(adaptive=adaptive)
  params = made.init(KEY)
  _, obs = ENV.init(jnp.arange(B))
  keys = jax.random.split(jax.random.key(1), B)
  return made, params, keys, jax.jit(made.act)(params, obs, keys)


@pytest.mark.parametrize('adaptive', [False, True], ids=['pi0', 'pi05'])
def test_actions_are_scored_as_they_were_recorded(adaptive):
  made, params, _, x = acted(adaptive)
  assert x.action.path.shape == (B, 5, CHUNK * 3)
  now = jax.jit(made.evaluate)(params, x.obs, x.action)
  np.testing.assert_allclose(now.logp, x.logp, atol=1e-5)
  np.testing.assert_allclose(now.value, made.value(params, x.obs), atol=1e-6)


def test_numbers_that_the_environment_does_not_take_have_no_probability():
  made, params, _, x = acted(False)
  index = int(x.action.stochastic[0, 0]) + 1
  by_width = x.action.path.reshape(B, 5, CHUNK, 3)

  evaluate = jax.jit(made.evaluate)

  def scored(number):
    path = by_width.at[0, index, :, number].add(0.1).reshape(B, 5, -1)
    action = x.action._replace(path=path)
    return float(evaluate(params, x.obs, action).logp[0])

  assert scored(2) == pytest.approx(float(x.logp[0]), abs=1e-5)
  assert abs(scored(1) - float(x.logp[0])) > 1e-3
  env_action = made.to_env_action(x.action)
  np.testing.assert_array_equal(
    env_action, np.clip(by_width[:, -1, :, :2], -1, 1)
  )


def test_a_row_acts_by_its_key_and_its_picture():
  made, params, keys, x = acted(False)
  some = slice(1, 3)
  act = jax.jit(made.act)
  few = act(params, jax.tree.map(lambda x: x[some], x.obs), keys[some])
  np.testing.assert_allclose(few.action.path, x.action.path[some], atol=1e-5)
  dark = jax.tree.map(lambda x: 0 * x if x.dtype == jnp.uint8 else x, x.obs)
  other = act(params, dark, keys)
  moved = np.abs(other.action.path[:, -1] - x.action.path[:, -1]).max(1)
  assert (moved > 1e-4).all()


def test_only_the_expert_and_the_critic_learn_if_so_wished(tmp_path):
  make = functools.partial(policy, expert_only=True)
  workflow = workflows.embodied_grpo(
    ENV,
    make,
    optimizers.adamw(1e-2),
    num_envs=4,
    group_size=2,
    num_steps=2,
    episode_reward=episode_stats.episode_return,
  )
  before = workflow.init(KEY)
  after, info = workflow.step(before, (), KEY)
  assert np.isfinite(read(info)['train/policy_loss'])
  old, new = before.actor.params, after.actor.params
  same = lambda a, b: jax.tree.map(np.testing.assert_array_equal, a, b)
  same(old[base.FROZEN], new[base.FROZEN])
  with pytest.raises(AssertionError):
    same(old['expert'], new['expert'])
  # A checkpoint is what a policy starts from.
  full = old[base.FROZEN] | {'expert': new['expert']}
  pi0_files.write(tmp_path, full, config())
  same(policy(checkpoint=str(tmp_path), critic=False).init(KEY), full)


def test_what_the_model_does_not_fit_is_refused():
  for env, message in (
    (push.push(), 'π0 reads images, and'),
    (push.push(image_size=8), r'is \[8, 8, 3\], and the model reads'),
    (ENV._replace(action_low=(0.0,) * 4), 'actions have 4.*room for 3: make A'),
  ):
    with pytest.raises(ValueError, match=message):
      policy(env)
  with pytest.raises(ValueError, match="give exploration.kind = 'sde'"):
    policy(exploration=flow_policy.Exploration('noise'))
  with pytest.raises(ValueError, match='π0.5 reads the state in its instr'):
    policy(adaptive=True, ignored=())
