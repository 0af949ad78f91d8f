"""No plan changes what PPO of texts computes.

Placing changes no bit, also where the critic has a place of its own. Pieces,
meshes and micro-batches change rounding.
"""

import dataclasses
import functools

import jax
import optax
import pytest

import claims
from planner.ir import plan as plan_lib
from stages import workflows
from stages.language import value_model
from tests.rlinf_jax.runtime.plans import invariance_test, random_plans_test
import tiny

COMMON = (
  'repeat keys generate reward ref_logp value compute_advantages measure '
  'whiten minibatch_ids minibatches gradient apply merge_info'
).split()
OF_CRITIC = 'critic_gradient critic_apply critic_merge_info'.split()
ROWS = {'gradient': 8, 'critic_gradient': 8, 'value': 8}
KEEP = optax.chain(optax.trace(decay=0.0), optax.scale(-0.01))
STEPS = 2
# Trunk of the critic, minibatches, epochs, and how a group is made.
UPDATES = [
  ('own', 1, 1, {'kl_reward_coef': 0.1}),
  ('own', 2, 2, {'kl_coef': 0.1, 'critic_warmup_steps': 1}),
  ('policy', 1, 1, {'critic_gae_lambda': 1.0, 'critic_warmup_steps': 1}),
]
# A critic on the policy's trunk, in two pieces with micro-batches, on four
# places with a mesh. Below, one with its own trunk.
KEPT = (4,)


pytestmark = pytest.mark.usefixtures('in_float64')


@functools.cache
def workflow(index):
  trunk, n, epochs, kwargs = UPDATES[index]
  config = dataclasses.replace(tiny.CONFIG, dtype='float64')
  make = value_model.own_trunk if trunk == 'own' else value_model.head
  return workflows.ppo(
    tiny.policy('float64'),
    invariance_test.even,
    make(config),
    KEEP,
    KEEP,
    group_size=invariance_test.GROUP,
    num_minibatches=n,
    num_epochs=epochs,
    **kwargs,
  )


def begin(index):
  """A state whose actor has moved away from its reference, with values."""
  state = workflow(index).init(jax.random.key(0))
  other = workflow(index).init(jax.random.key(1)).actor.params

  def moved(x, y):
    return x + 0.1 * y

  params = jax.tree.map(moved, state.actor.params, other)
  return state._replace(actor=state.actor._replace(params=params))


@functools.cache
def eager(index):
  """State and info after each step, called with arrays."""
  state, results = begin(index), []
  for i in range(STEPS):
    batch, key = tiny.problem(seed=i), random_plans_test.key(i)
    state, info = workflow(index).step(state, batch, key)
    results.append((tiny.arrays(state), tiny.arrays(info)))
  return results


def check(plan, index):
  batches = [tiny.problem(seed=i) for i in range(STEPS)]
  results = random_plans_test.run(plan, workflow(index), begin(index), batches)
  random_plans_test.compare(plan, results, eager(index))


@pytest.mark.slow
@pytest.mark.parametrize('seed', claims.some(range(12), KEPT))
def test_no_plan_changes_the_mathematics(seed):
  plan, index = random_plans_test.random_plan(
    seed,
    [*COMMON, *OF_CRITIC],
    ROWS,
    ('ref_logp', 'critic_apply'),
    range(3),
    ['gradient', 'critic_gradient'],
  )
  check(plan, index)


@pytest.mark.slow
def test_an_actor_a_critic_and_a_reference_have_places_of_their_own():
  places = {name: {'devices': [i]} for i, name in enumerate('abc')}
  of_critic = ['value', *OF_CRITIC]
  stages = {'*': 'a', 'ref_logp': 'c'} | dict.fromkeys(of_critic, 'b')
  sketch = {'places': places, 'stages': stages}
  check(plan_lib.parse(sketch, [*COMMON, *OF_CRITIC]), 1)
