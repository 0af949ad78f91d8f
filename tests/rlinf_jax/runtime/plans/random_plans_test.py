"""A plan of several places never changes the mathematics.

Moving stages between places of one device changes no bit. Pieces of the batch
and other meshes change rounding.
"""

import functools

import jax
import numpy as np
import pytest

import claims
import in_memory
from planner.ir import flow as flow_lib
from planner.ir import plan as plan_lib
from planner.lower import passes
from rlinf_jax.runtime import local
from stages import remat as remat_lib
from tests.rlinf_jax.runtime.plans import invariance_test
import tiny
import toys

STAGES = (
  'repeat keys generate reward measure group_advantage ref_logp '
  'minibatch_ids minibatches gradient apply merge_info'
).split()
# Minibatches, epochs, and how rows are assigned to minibatches.
UPDATES = [(1, 1, 'row'), (2, 1, 'row'), (1, 2, 'row'), (2, 2, 'shuffled')]
# Places to choose from. Each has the same devices in every plan, so that plans
# share compiled calls.
PLACES = {
  'p0': plan_lib.Placement((0,)),
  'p1': plan_lib.Placement((1,)),
  'p2': plan_lib.Placement((2,)),
  'p3': plan_lib.Placement((3, 4), (('data', 2),)),
  'p4': plan_lib.Placement((5, 6), (('fsdp', 2),)),
}
# The first has four places, both meshes, pieces, micro-batches, offloads, an
# order of its own, remat, and shuffled minibatches of several epochs. The
# second only places.
KEPT = 10, 12


pytestmark = pytest.mark.usefixtures('in_float64')


@functools.cache
def workflow(updates):
  n, epochs, membership = updates
  return invariance_test.grpo(
    'float64', num_minibatches=n, num_epochs=epochs, minibatch_by=membership
  )


def begin(updates):
  return invariance_test.begin(workflow(updates))


@functools.cache
def eager(updates):
  """State and info after each of two steps, called with arrays."""
  state, results = begin(updates), []
  for i in range(2):
    state, info = workflow(updates).step(state, tiny.problem(seed=i), key(i))
    results.append((tiny.arrays(state), tiny.arrays(info)))
  return results


def key(i):
  return jax.random.key(3 + i)


def random_plan(seed, stages, rows, offload, updates, remat=()):
  """A plan of one to four places, and one of `updates` to test it with.

  Args:
    seed: of all choices.
    stages: stages to place.
    rows: micro-batch rows, by stage, in half of the plans.
    offload: stages that may offload.
    updates: to choose from.
    remat: stages that differentiate a transformer.
  """
  rng = np.random.default_rng(seed)
  names = rng.permutation(list(PLACES))[: rng.integers(1, 5)].tolist()
  places = {name: PLACES[name] for name in names}
  stages = {name: names[rng.integers(len(names))] for name in stages}
  pieces = int(rng.choice([1, 2, 4]))
  rows = rows if rng.integers(2) else {}
  offload = tuple(name for name in offload if rng.integers(2))
  policy = remat_lib.POLICIES[seed % len(remat_lib.POLICIES)]
  remat = {} if policy == remat_lib.NONE else dict.fromkeys(remat, policy)
  plan = plan_lib.Plan(places, stages, rows, pieces, offload, remat=remat)
  return plan, updates[rng.integers(len(updates))]


def run(plan, workflow, state, batches):
  """State and info after each of some planned steps."""
  runtime = local.LocalRuntime(plan, step=tiny.trace(workflow, batches[0]))
  in_memory.start(runtime, state)
  results = []
  for i, batch in enumerate(batches):
    info = runtime.step(batch, key(i))
    results.append((tiny.arrays(in_memory.state(runtime)), tiny.arrays(info)))
  runtime.close()
  return results


def compare(plan, got, want):
  """Asserts equality: of bits if the plan only places, else to rounding."""
  alone = all(len(place.devices) == 1 for place in plan.places.values())
  exact = alone and plan.pieces == 1 and not (plan.micro_batch or plan.remat)
  for trees in zip(got, want, strict=True):
    for one, other in zip(*trees, strict=True):
      if exact:
        tiny.assert_same_bits(one, other)
        continue
      assert one.keys() == other.keys()
      for name, x in other.items():
        scale = max(1.0, float(np.abs(x).max(initial=0)))
        np.testing.assert_allclose(
          one[name], x, rtol=1e-9, atol=1e-9 * scale, err_msg=name
        )


@pytest.mark.slow
@pytest.mark.parametrize('seed', claims.some(range(24), KEPT))
def test_no_plan_changes_the_mathematics(seed):
  plan, updates = random_plan(
    seed,
    STAGES,
    {'gradient': 8},
    ('ref_logp', 'apply'),
    UPDATES,
    ['gradient'],
  )
  batches = [tiny.problem(seed=i) for i in range(2)]
  if seed % 3:
    step = tiny.trace(workflow(updates), batches[0])
    plan = passes.with_order(step, plan, toys.Random(seed))
  results = run(plan, workflow(updates), begin(updates), batches)
  compare(plan, results, eager(updates))


@pytest.mark.slow
@pytest.mark.parametrize('staleness', [1, 2])
def test_stale_steps_overlap_and_compute_the_same(staleness):
  workflow = invariance_test.grpo('float64', staleness=staleness)
  state, n = invariance_test.begin(workflow), 5
  sketch = {
    'places': {'actor': {'devices': [0]}, 'learner': {'devices': [1]}},
    'stages': dict.fromkeys(('repeat', 'keys', 'generate'), 'actor')
    | {'*': 'learner'},
  }
  step = flow_lib.trace(workflow.step, state, tiny.problem(), key(0))
  runtime = local.LocalRuntime(plan_lib.parse(sketch, step.stages), step=step)
  in_memory.start(runtime, state)
  pending, infos = [], []
  for i in range(n):
    pending.append(runtime.submit(tiny.problem(seed=i), key(i)))
    if len(pending) > staleness:
      infos.append(pending.pop(0).result())
  infos += [info.result() for info in pending]
  for i in range(n):
    state, info = workflow.step(state, tiny.problem(seed=i), key(i))
    tiny.assert_same_bits(infos[i], info)
  tiny.assert_same_bits(in_memory.state(runtime), state)
  # The actor generated while the learner was at an earlier step.
  runs = [s for s in runtime.timeline.take() if s.what == 'run']
  acted = {s.step: s.start for s in runs if s.stage == 'generate'}
  learned = {s.step: s.end for s in runs if s.stage == 'apply'}
  assert any(acted[i + 1] < learned[i] for i in range(1, n))
  runtime.close()
