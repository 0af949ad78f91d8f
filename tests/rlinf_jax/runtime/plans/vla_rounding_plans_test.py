"""Places that only act or score with VLAs hold rounded weights, bit for bit.

A policy that says nothing of what it rounds is the reference: its places hold
float32.
"""

import dataclasses
import functools

import jax
import numpy as np
import optax
import pytest

import claims
import in_memory
from planner.ir import plan as plan_lib
from rlinf_jax.runtime import local
from stages import workflows
from stages.envs import action_chunks, episode_stats, push
from stages.models import lora as lora_lib
from stages.models.control import flow_policy
from stages.vla.openvla import openvla_env, openvla_oft, openvla_oft_env
from tests.rlinf_jax.runtime.plans import rounding_plans_test as rounding_plans
from tests.rlinf_jax.runtime.plans import vla_plans_test
import tiny

KEY = jax.random.key(0)
CHUNK = vla_plans_test.CHUNK
LORA = lora_lib.Lora(rank=2)
ALL = ('vision', 'projector', 'language')
ACT = 'rollout', 'attempt'
PARTS = 'dino', 'siglip', 'llama', 'vision', 'trunk', 'expert'


def narrow(config):
  """A model whose parts compute in bfloat16."""
  parts = {k: getattr(config, k, None) for k in PARTS}
  return dataclasses.replace(
    config,
    **{
      k: dataclasses.replace(x, dtype='bfloat16')
      for k, x in parts.items()
      if x is not None
    },
  )


def openvla(**settings):
  config = narrow(vla_plans_test.openvla_config())
  own = {'config': config, 'instruction': (1, 5, 3), 'chunk': CHUNK}
  return functools.partial(openvla_env.policy, **own, **settings)


def oft(film=False, **settings):
  own = narrow(vla_plans_test.openvla_config())
  config = openvla_oft.Config(own, Z=CHUNK, A=2, O=2, film=film)
  own = {'config': config, 'instruction': (1, 5, 3), 'state': 'state'}
  return functools.partial(openvla_oft_env.policy, **own, **settings)


def pi(adaptive=False, **settings):
  made = vla_plans_test.pi0_policy_(adaptive, **settings)
  return functools.partial(made, config=narrow(made.keywords['config']))


NOISE = flow_policy.Exploration('noise')


def pi05(**settings):
  return pi(True, ignored=('state',), exploration=NOISE, **settings)


def env():
  size = vla_plans_test.SIZE
  return action_chunks.chunked(
    push.push(image_size=size, horizon=2 * CHUNK), CHUNK, 0.9
  )


def grpo(policy):
  return workflows.embodied_grpo(
    env(),
    policy,
    optax.sgd(0.1),
    num_envs=4,
    group_size=2,
    episode_reward=episode_stats.episode_return,
    kl_coef=0.1,
  )


def ppo(policy):
  return workflows.embodied_ppo(
    env(),
    policy,
    optax.sgd(0.1),
    num_envs=2,
    num_steps=2,
    num_minibatches=1,
    num_epochs=1,
  )


SCORE = 'compute_advantages', 'proximal_logp'
CASES = {
  'openvla': (grpo, openvla(), ACT, {}),
  'oft': (ppo, oft(), ACT, {}),
  'film': (grpo, oft(film=True), (*ACT, 'proximal_logp'), {}),
  'oft_lora': (grpo, oft(film=True, lora=LORA), ACT, {}),
  'pi0': (grpo, pi(), ACT, {}),
  'pi05': (ppo, pi05(), (*ACT, *SCORE), {}),
  'pi0_lora': (grpo, pi(lora=LORA), ACT, {}),
  'pi05_expert': (ppo, pi05(frozen=ALL), ACT, {}),
  'pi0_vision': (grpo, pi(frozen=ALL[:1]), ACT, {}),
  'pieces': (grpo, pi(), ACT, {'pieces': 2}),
  'meshes': (ppo, oft(), ACT, {'places': rounding_plans.MESHES}),
  'shared': (
    grpo,
    oft(),
    ACT,
    {
      'places': dict.fromkeys(rounding_plans.APART, plan_lib.Placement((0,))),
      'shared_devices': tuple(rounding_plans.APART),
    },
  ),
}


def runtime_of(workflow, apart, places=None, **fields):
  """A runtime with some stages at the second place."""
  flows = tiny.trace(workflow, ()), tiny.trace_evaluation(workflow, seeds())
  names = dict.fromkeys((*flows[0].stages, *flows[1].stages), 'learner')
  names |= {name: 'sampler' for name in names if name in apart}
  chosen = plan_lib.Plan(places or rounding_plans.APART, names, **fields)
  return local.LocalRuntime(chosen, step=flows[0], evaluate=flows[1])


def seeds():
  return np.arange(4, dtype=np.int32)


def run(workflow, runtime, steps=2):
  """Metrics of some steps and of an evaluation, and the last parameters."""
  in_memory.start(runtime, workflow.init(KEY))
  found = []
  for i in range(steps):
    info = runtime.step((), jax.random.fold_in(KEY, i))
    found.append(jax.device_get(info))
  found.append(jax.device_get(runtime.evaluate(seeds(), KEY)))
  return found, jax.device_get(workflow.params(in_memory.state(runtime)))


@pytest.mark.slow
@pytest.mark.parametrize('case', claims.some([*CASES], ['pi0_lora']))
def test_a_place_that_acts_holds_rounded_matrices_and_changes_no_bit(case):
  make, policy, apart, fields = CASES[case]
  plain = lambda env: policy(env)._replace(round_params=None)
  runs = []
  for one in policy, plain:
    workflow = make(one)
    runtime = runtime_of(workflow, apart, **fields)
    result = run(workflow, runtime)
    held = rounding_plans.held(runtime)
    runs.append((result, held, rounding_plans.sent(runtime)))
    runtime.close()
  (got, types, size), (want, wide, all_bytes) = runs
  jax.tree.map(np.testing.assert_array_equal, got, want)
  own = policy(env())
  params = jax.eval_shape(own.init, KEY)
  rounded = jax.tree.leaves(jax.eval_shape(own.round_params, params))
  assert [*types.values()] == [x.dtype.name for x in rounded]
  before = [x.dtype.name for x in jax.tree.leaves(params)]
  assert [*wide.values()] == before
  saved = [
    2 * x.size
    for x, dtype in zip(rounded, before, strict=True)
    if x.dtype.name != dtype
  ]
  assert all_bytes - size == sum(saved) > 0
