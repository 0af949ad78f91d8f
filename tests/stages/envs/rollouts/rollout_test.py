"""Rollouts: the loop over steps in a JAX environment."""

import jax
import jax.numpy as jnp

import jax_envs
import stages
from stages.envs.rollouts import rollout
from stages.models.control import gaussian_policy
import tiny

KEY = jax.random.key(0)


def test_a_loop_of_steps_prepares_its_parameters_once():
  env = jax_envs.line()
  own = gaussian_policy.policy(env, width=8)
  prepared = []

  def prepare(params):
    prepared.append(params)
    return {'prepared': params}

  def act(params, *args, **kwargs):
    return own.act(params['prepared'], *args, **kwargs)

  params = own.init(KEY)
  seed_B = jnp.arange(4, dtype=jnp.int32)
  keys = stages.keys(KEY, seed_B)
  got, want = (
    rollout.rollout(policy, env, 3)(
      params, (), *rollout.reset(env)(seed_B), keys
    )
    for policy in (own._replace(act=act, prepare_act=prepare), own)
  )
  tiny.assert_same_bits(got, want)
  assert len(prepared) == 1
