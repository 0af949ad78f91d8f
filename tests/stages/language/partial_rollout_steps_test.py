"""Steps whose rows are carried from one to the next."""

import functools

import jax
import numpy as np
import pytest

import claims
from planner.ir import plan as plan_lib
from rlinf_jax.run_files import checkpoint
from rlinf_jax.runtime import flows
import saved
from stages import workflows
from stages.language import partial_rollout
from stages.learn import optimizers
from tests.rlinf_jax.runtime.plans import invariance_test, random_plans_test
from tests.stages.language import partial_rollout_test
import tiny
from tiny import read


@functools.cache
def grpo(dtype='float32', slots=None, **kwargs):
  kwargs = {
    'optimizer': optimizers.adamw(1e-2),
    'rollouts': functools.partial(
      partial_rollout.partial_rollouts, max_carry=1, extra_groups=3
    ),
  } | kwargs
  return workflows.grpo(
    partial_rollout_test.policy(dtype, length=12, slots=slots),
    invariance_test.even if dtype == 'float64' else tiny.even,
    group_size=4,
    **kwargs,
  )


@pytest.mark.slow
def test_a_step_learns_from_rows_that_earlier_steps_started():
  workflow = grpo()
  state = flows.first_state(workflow, partial_rollout_test.KEY, tiny.problem())
  rewards, continued, gaps = [], [], []
  for i in range(30):
    key = jax.random.fold_in(partial_rollout_test.KEY, i)
    state, info = workflow.step(state, tiny.problem(seed=i), key)
    numbers = read(info)
    rewards.append(numbers['rollout/reward_mean'])
    continued.append(numbers['rollout/continued_fraction'])
    assert numbers['rollout/staleness_max'] <= 1
    gaps.append(numbers['rollout/logprob_gap_max'])
  assert rewards[0] < 0.65 < 0.9 < np.mean(rewards[-3:])
  assert max(continued) > 0.1
  # First tokens of one version, then of two.
  assert gaps[0] < 1e-4 < 1e-2 < gaps[1]


@pytest.mark.slow
def test_staleness_adds_to_the_age_of_carried_rows():
  workflow = grpo(staleness=1)
  state, stale = (
    flows.first_state(workflow, partial_rollout_test.KEY, tiny.problem()),
    [],
  )
  for i in range(4):
    state, info = workflow.step(state, tiny.problem(seed=i), jax.random.key(i))
    stale.append(read(info)['rollout/staleness_max'])
  assert stale == [0, 1, 2, 2]


@pytest.mark.slow
@pytest.mark.parametrize('slots', claims.some([None, 7], [7]))
def test_carried_rows_are_saved_in_a_checkpoint(tmp_path, slots):
  workflow = grpo(slots=slots)
  state = flows.first_state(workflow, partial_rollout_test.KEY, tiny.problem())
  for i in range(2):
    state, _ = workflow.step(state, tiny.problem(seed=i), jax.random.key(i))
  folder = checkpoint.Checkpoints(tmp_path, 1)
  folder.save(2, saved.Tree(state), {'n': np.array(2)}, {})
  folder.close()
  fresh = flows.first_state(workflow, jax.random.key(7), tiny.problem())
  folder = checkpoint.Checkpoints(tmp_path, 1)
  _, restored = saved.load(folder, fresh, {'n': np.array(0)})
  folder.close()
  args = tiny.problem(seed=2), jax.random.key(2)
  tiny.assert_same_bits(
    workflow.step(restored, *args), workflow.step(state, *args)
  )


PLANS = {
  'places': {
    'places': {p: {'devices': [i]} for i, p in enumerate('abc')},
    'stages': {'generate': 'a', 'reward': 'b', 'proximal_logp': 'b', '*': 'c'},
    'offload': ['apply'],
  },
  'pieces and a mesh': {
    'places': {
      # 44 rows in groups of four: each device has parts of groups.
      'a': {'devices': [0, 1, 2, 3], 'axes': [['data', 4]]},
      'b': {'devices': [4, 5], 'axes': [['fsdp', 2]]},
    },
    'stages': {'generate': 'a', '*': 'b'},
    'pieces': 2,
  },
}


@functools.cache
def updated(slots=None):
  return grpo('float64', slots, num_minibatches=2, minibatch_by='arrival')


@functools.cache
def eager():
  """Three eager steps; the last emits rows that an earlier one started."""
  workflow = updated()
  batches = [tiny.problem(seed=i) for i in range(3)]
  first = state = flows.first_state(
    workflow, partial_rollout_test.KEY, batches[0]
  )
  want = []
  for i, batch in enumerate(batches):
    state, info = workflow.step(state, batch, random_plans_test.key(i))
    want.append((tiny.arrays(state), tiny.arrays(info)))
  assert read(info)['rollout/continued_fraction'] > 0
  return workflow, first, batches, want


@pytest.mark.slow
@pytest.mark.parametrize('name', claims.some(PLANS, ['pieces and a mesh']))
def test_no_plan_changes_carried_rows(name, in_float64):
  workflow, first, batches, want = eager()
  flow = tiny.trace(workflow, batches[0])
  plan = plan_lib.parse(PLANS[name], flow.stages)
  got = random_plans_test.run(plan, workflow, first, batches)
  random_plans_test.compare(plan, got, want)


@pytest.mark.slow
def test_no_slots_of_a_plan_change_carried_rows(in_float64):
  """Four devices with three slots each, against eager steps without slots."""
  _, first, batches, want = eager()
  workflow, name = updated(slots=3), 'pieces and a mesh'
  plan = plan_lib.parse(PLANS[name], tiny.trace(workflow, batches[0]).stages)
  got = random_plans_test.run(plan, workflow, first, batches)
  random_plans_test.compare(plan, got, want)
