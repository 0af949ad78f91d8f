"""No plan changes what RL computes with vision-language-action models."""

import functools
import itertools

import jax
import optax
import pytest

import claims
from stages import workflows
from stages.envs import action_chunks, episode_stats, push
from stages.models import transformer
from stages.models.control import flow_policy
from stages.models.vision import vit
from stages.vla import pictures
from stages.vla.openvla import (
  openvla,
  openvla_env,
  openvla_oft,
  openvla_oft_env,
)
from stages.vla.pi0 import pi0, pi0_policy
from tests.rlinf_jax.runtime.plans import (
  embodied_ppo_plans_test,
  random_plans_test,
)
import tiny

STAGES = (
  'seeds reset keys rollout group_advantage measure ref_logp minibatch_ids '
  'minibatches gradient apply obs_moments update_obs_stats'
).split()
KEEP = optax.chain(optax.trace(decay=0.0), optax.scale(-0.01))
STEPS = 2
SIZE, CHUNK = 8, 2
# Four places, three of them meshes; two places, in pieces and micro-batches.
# π0.5 is π0 with one more input of its layers.
KEPT = ('openvla', 5), ('pi05', 6)
# A mesh, pieces and micro-batches.
KEPT_PPO = (('openvla_oft', 6),)
WIDE = {'dtype': 'float64', 'init_stddev': 0.3}
TOWER = functools.partial(
  vit.Config, image_size=SIZE, patch_size=4, D=4, H=1, F=4, **WIDE
)

pytestmark = pytest.mark.usefixtures('in_float64')


def openvla_config():
  return openvla.Config(
    TOWER(L=2, has_class=True, registers=1, layer_scale=True),
    TOWER(L=2),
    transformer.Config(
      V=32,
      D=8,
      L=1,
      H=1,
      K=1,
      W=8,
      F=8,
      qkv_bias=False,
      tie_embeddings=False,
      **WIDE,
    ),
    padded=8,
    bins=16,
    pictures=pictures.Pictures(sizes=(SIZE, SIZE)),
  )


def openvla_policy():
  return functools.partial(
    openvla_env.policy,
    config=openvla_config(),
    instruction=(1, 5, 3),
    chunk=CHUNK,
  )


def openvla_oft_policy():
  config = openvla_oft.Config(openvla_config(), Z=CHUNK, A=2, O=2)
  return functools.partial(
    openvla_oft_env.policy, config=config, instruction=(1, 5, 3), state='state'
  )


def pi0_policy_(adaptive=False, **settings):
  sizes = {'L': 1, 'H': 1, 'K': 1, 'W': 8, 'F': 8, **WIDE}
  config = pi0.Config(
    TOWER(L=1),
    pi0.GEMMA(V=8, D=8, **sizes),
    pi0.GEMMA(V=1, D=8, **sizes),
    Z=CHUNK,
    A=2,
    O=2,
    adaptive=adaptive,
  )
  return functools.partial(
    pi0_policy.policy,
    config=config,
    instruction=(1, 5, 3),
    num_steps=3,
    critic_width=8,
    **settings,
  )


MODELS = {
  'openvla': openvla_policy(),
  'openvla_oft': openvla_oft_policy(),
  'pi0': pi0_policy_(),
  'pi05': pi0_policy_(
    adaptive=True,
    ignored=('state',),
    exploration=flow_policy.Exploration('noise'),
  ),
}


@functools.cache
def workflow(model):
  env = push.push(image_size=SIZE, horizon=2 * CHUNK)
  return workflows.embodied_grpo(
    action_chunks.chunked(env, CHUNK, 0.9),
    MODELS[model],
    KEEP,
    num_envs=16,
    group_size=2,
    episode_reward=episode_stats.episode_return,
    kl_coef=0.1,
    entropy_coef=0.01,
  )


@functools.cache
def ppo(model):
  env = push.push(image_size=SIZE, horizon=2 * CHUNK)
  return workflows.embodied_ppo(
    action_chunks.chunked(env, CHUNK, 0.9),
    MODELS[model],
    KEEP,
    num_envs=8,
    num_steps=4,  # Two episodes.
    num_minibatches=2,
    num_epochs=1,
    value_clip=0.2,
    entropy_coef=0.01,
  )


@functools.cache
def eager(make, model):
  """State and info after each step, called with arrays."""
  state, results = make(model).init(jax.random.key(0)), []
  for i in range(STEPS):
    state, info = make(model).step(state, (), random_plans_test.key(i))
    results.append((tiny.arrays(state), tiny.arrays(info)))
  return results


@pytest.mark.slow
@pytest.mark.parametrize(
  'model, seed', claims.some([*itertools.product(MODELS, range(8))], KEPT)
)
def test_no_plan_changes_the_mathematics(model, seed):
  rows = {'rollout': 2, 'gradient': 4}
  plan, _ = random_plans_test.random_plan(
    seed, STAGES, rows, ('ref_logp', 'apply'), [None]
  )
  state = workflow(model).init(jax.random.key(0))
  results = random_plans_test.run(plan, workflow(model), state, [()] * STEPS)
  random_plans_test.compare(plan, results, eager(workflow, model))


@pytest.mark.slow
@pytest.mark.parametrize(
  'model, seed', claims.some([*itertools.product(MODELS, range(8))], KEPT_PPO)
)
def test_no_plan_changes_ppo(model, seed):
  rows = {'rollout': 2, 'gradient': 4}
  plan, _ = random_plans_test.random_plan(
    seed, embodied_ppo_plans_test.STAGES, rows, ('apply',), [None]
  )
  state = ppo(model).init(jax.random.key(0))
  results = random_plans_test.run(plan, ppo(model), state, [()] * STEPS)
  random_plans_test.compare(plan, results, eager(ppo, model))


@pytest.mark.slow
@pytest.mark.parametrize(
  'model', claims.some([*MODELS], [model for model, _ in KEPT])
)
def test_the_eager_steps_change_the_parameters(model):
  """Otherwise the plans above would agree trivially."""
  first, second = eager(workflow, model)
  moved = [n for n, x in first[0].items() if (x != second[0][n]).any()]
  towers = {
    'openvla': ('dino', 'siglip', 'llama'),
    'openvla_oft': ('dino', 'siglip', 'llama', 'state_projector'),
    'pi0': ('vision', 'expert'),
    'pi05': ('vision', 'expert', 'spread'),
  }
  for part in towers[model]:
    assert any(part in name for name in moved), (part, moved)
