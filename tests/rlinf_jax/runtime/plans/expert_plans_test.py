"""Plans that divide the experts of a mixture among devices.

One step of GRPO, which samples, scores and updates on a mesh with an axis
`expert`, is compared with the workflow called with arrays.
"""

import functools
import itertools

import jax
import numpy as np
import pytest

import claims
from planner.ir import plan as plan_lib
from stages import workflows
from tests.rlinf_jax.runtime.plans import invariance_test
import tiny

PLACES = {
  'experts': (('data', 2), ('expert', 2)),
  'sharded': (('data', 2), ('fsdp', 2), ('expert', 2)),
}
HOW = {
  'static': {},
  'slots': {'slots': 3},
  'replayed': {'replay_routing': True},
}


@functools.cache
def grpo(**kwargs):
  """GRPO that reads the router to sample, to score and to balance."""
  return workflows.grpo(
    tiny.policy('float64', config=tiny.EXPERTS, **kwargs),
    invariance_test.even,
    invariance_test.KEEP,
    group_size=invariance_test.GROUP,
    balance_coef=0.5,
  )


@functools.cache
def unplanned(**kwargs):
  """State and info of one step without a plan, its batch and its key."""
  workflow = grpo(**kwargs)
  batch, key = tiny.problem(columns=6), jax.random.key(3)
  state = invariance_test.begin(workflow)
  # Jitted: to compile each primitive on its own would take longer.
  return jax.jit(workflow.step)(state, batch, key), batch, key


@pytest.mark.slow
@pytest.mark.usefixtures('in_float64')
@pytest.mark.parametrize(
  'place, how',
  claims.some(list(itertools.product(PLACES, HOW)), [('experts', 'static')]),
)
def test_a_step_with_divided_experts_changes_only_rounding(
  place, how, monkeypatch
):
  axes, how = PLACES[place], HOW[how]
  devices = tuple(range(int(np.prod([n for _, n in axes]))))
  monkeypatch.setitem(tiny.PLACES, place, plan_lib.Placement(devices, axes))
  (want, expected), batch, key = unplanned(**how)
  workflow = grpo(**how)
  start = invariance_test.begin(workflow)
  got, info = invariance_test.planned(workflow, start, batch, key, place, {})
  for name in 'gate_EDF', 'up_EDF', 'down_EFD':
    expert = got.actor.params['layers'][name]
    assert expert.sharding.spec[1] == 'expert', name
  # The completions, too, and the gradient.
  invariance_test.same((got, info), (want, expected), 1e-9)
  assert invariance_test.apart(got.actor.params, want.actor.params) <= 1e-12
