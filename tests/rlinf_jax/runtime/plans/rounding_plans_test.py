"""Places that only sample or score hold rounded parameters, to the same bits.

A policy without `round_params` is the reference: its places hold float32.
"""

import functools

import jax
import numpy as np
import pytest

import claims
import in_memory
from planner.ir import flow as flow_lib
from planner.ir import plan as plan_lib
from rlinf_jax.runtime import flows, local, programs
import saved
from stages import workflows
from stages.language import conversation, evaluate, partial_rollout
from stages.learn import optimizers
import tiny
import toy_conversation

KEY = jax.random.key(0)
SAMPLE = 'generate', 'answer'
APART = {
  'learner': plan_lib.Placement((0,)),
  'sampler': plan_lib.Placement((1,)),
}
MESHES = {
  'learner': plan_lib.Placement((0, 1), (('fsdp', 2),)),
  'sampler': plan_lib.Placement((2, 3, 4, 5), (('fsdp', 2), ('tensor', 2))),
}


def grpo(policy, verify=tiny.even, **kwargs):
  return workflows.grpo(
    policy, verify, optimizers.adamw(1e-2), group_size=4, **kwargs
  )


def partial(policy):
  return grpo(
    policy,
    rollouts=functools.partial(
      partial_rollout.partial_rollouts, max_carry=2, extra_groups=2
    ),
  )


def partial_talk(policy):
  converse = toy_conversation.converse(3)
  return grpo(
    policy,
    conversation.episode_return(),
    rollouts=functools.partial(
      conversation.partial_conversations,
      converse=converse,
      max_carry=2,
      extra_groups=2,
    ),
    evaluator=functools.partial(evaluate.evaluate, converse=converse),
  )


def dapo(policy):
  return workflows.dapo(
    policy, tiny.even, optimizers.adamw(1e-2), group_size=4, max_rounds=2
  )


def runtime_of(workflow, apart=SAMPLE, places=None, **fields):
  """A runtime with some stages at the second place."""
  step = tiny.trace(workflow, tiny.problem())
  examine = flow_lib.trace(
    lambda state, *inputs: (state, workflow.evaluate(state, *inputs)),
    programs.state_shapes(step),
    tiny.problem(),
    KEY,
  )
  names = dict.fromkeys((*step.stages, *examine.stages), 'learner')
  names |= {name: 'sampler' for name in names if name.startswith(apart)}
  chosen = plan_lib.Plan(places or APART, names, **fields)
  return local.LocalRuntime(chosen, step=step, evaluate=examine)


def run(workflow, runtime, steps=2):
  """Metrics of some steps and of an evaluation, and the last parameters."""
  in_memory.start(runtime, flows.first_state(workflow, KEY, tiny.problem()))
  found = []
  for i in range(steps):
    key = jax.random.fold_in(KEY, i)
    found.append(jax.device_get(runtime.step(tiny.problem(seed=i), key)))
  found.append(jax.device_get(runtime.evaluate(tiny.problem(seed=9), KEY)))
  state = in_memory.state(runtime)
  return found, jax.device_get(workflow.params(state))


def held(runtime, place='sampler'):
  """The types of the parameters that a place holds, by name."""
  flow = runtime.lowered['step'].flow
  names = {
    i: flow.values[start].name for i, (start, _) in enumerate(flow.carry)
  }
  return {
    names[i]: x.dtype.name
    for i, x in runtime.interpreters[place].state.items()
    if 'params.' in names[i]
  }


def sent(runtime):
  """Bytes that a step sends to the second place."""
  moved = programs.traffic(runtime.lowered['step'], lambda *_: '')
  return {target: size for _, target, _, size in moved}['sampler']


CASES = {
  'dense': (grpo, {}, SAMPLE, {}),
  'experts': (grpo, {'config': tiny.EXPERTS}, SAMPLE, {}),
  'slots': (grpo, {'slots': 4}, SAMPLE, {}),
  'packed': (grpo, {'packed_tokens': 32}, (*SAMPLE, 'proximal'), {}),
  'scoring': (grpo, {}, ('proximal',), {}),
  'partial': (partial, {}, SAMPLE, {}),
  'conversation': (partial_talk, {}, (*SAMPLE, 'read_carried'), {}),
  'dapo': (dapo, {}, SAMPLE, {}),
  'pieces': (grpo, {}, SAMPLE, {'pieces': 2}),
  'meshes': (grpo, {}, SAMPLE, {'places': MESHES}),
  'shared': (
    grpo,
    {},
    SAMPLE,
    {
      'places': dict.fromkeys(APART, plan_lib.Placement((0,))),
      'shared_devices': ('learner', 'sampler'),
    },
  ),
}


@pytest.mark.slow
@pytest.mark.parametrize('case', claims.some([*CASES], ['dense', 'dapo']))
def test_a_place_that_samples_holds_rounded_matrices_and_changes_no_bit(case):
  make, settings, apart, fields = CASES[case]
  policy = tiny.policy('bfloat16', **settings)
  runs = []
  for p in policy, policy._replace(round_params=None):
    workflow = make(p)
    runtime = runtime_of(workflow, apart, **fields)
    runs.append((run(workflow, runtime), held(runtime), sent(runtime)))
    assert {*held(runtime, 'learner').values()} == {'float32'}
    runtime.close()
  (got, types, size), (want, wide, all_bytes) = runs
  jax.tree.map(np.testing.assert_array_equal, got, want)
  rounded = params_of(policy)
  assert [*types.values()] == [x.dtype.name for x in rounded]
  assert {*wide.values()} == {'float32'}
  assert all_bytes - size == saved_bytes(policy)


def params_of(policy):
  """Shapes and types of rounded parameters."""
  params = jax.eval_shape(policy.init, KEY)
  return jax.tree.leaves(jax.eval_shape(policy.round_params, params))


def saved_bytes(policy):
  """Bytes of parameters that rounding saves."""
  return sum(2 * x.size for x in params_of(policy) if x.dtype == 'bfloat16')


def test_in_float32_nothing_is_rounded():
  runtime = runtime_of(grpo(tiny.policy()))
  assert not any(
    any(x.values()) for x in runtime.lowered['step'].rounded.values()
  )
  in_memory.start(runtime, grpo(tiny.policy()).init(KEY))
  assert {*held(runtime).values()} == {'float32'}
  runtime.close()


@pytest.mark.slow
@pytest.mark.parametrize('staleness', claims.some([1, 2], [2]))
def test_stale_parameters_are_rounded_at_the_place_that_samples(staleness):
  """Of the state, only the copy that samples differs, as all round it."""
  policy = tiny.policy('bfloat16')
  runs, states = [], []
  for p in policy, policy._replace(round_params=None):
    workflow = grpo(p, staleness=staleness)
    runtime = runtime_of(workflow, 'generate')
    runs.append((run(workflow, runtime, 4), held(runtime), sent(runtime)))
    states.append(saved.state_of(runtime))  # In float32, as in a checkpoint.
    runtime.close()
  (got, types, size), (want, _, all_bytes) = runs
  jax.tree.map(np.testing.assert_array_equal, got, want)
  assert [*types.values()] == [x.dtype.name for x in params_of(policy)]
  assert all_bytes - size == saved_bytes(policy)
  oldest, *others = states[1].past
  oldest = oldest._replace(
    params=jax.tree.map(
      lambda x, like: x.astype(like.dtype).astype(x.dtype),
      oldest.params,
      policy.round_params(oldest.params),
    )
  )
  want = states[1]._replace(past=(oldest, *others))
  jax.tree.map(np.testing.assert_array_equal, states[0], want)
