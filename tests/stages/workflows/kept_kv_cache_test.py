"""DAPO whose rounds keep keys and values of the rows that they carry."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from planner import cluster as cluster_lib
from planner.costs import roofline
from planner.counting import count
from planner.ir import plan as plan_lib
from planner.lower import unroll
from rlinf_jax.runtime import flows
from sharding import rules
from stages import workflows
from stages.language import partial_rollout, policy_stages
from stages.language.decoding import unfinished
from stages.learn import optimizers
from tests.planner.counting import engine_cost_test
from tests.stages.language import partial_rollout_test
from tests.stages.workflows import dapo_test
import tiny
from tiny import read

KEY = jax.random.key(0)
GROUP = 4
CARRIES = functools.partial(
  partial_rollout.partial_rollouts, max_carry=5, extra_groups=2
)


@pytest.mark.slow
def test_rounds_with_kept_keys_and_values_sample_the_same(monkeypatch):
  """Only the first of the four rounds of a step reads carried rows again."""
  encode, calls = unfinished._encoded, []

  def spy(*args):
    jax.debug.callback(lambda: calls.append(1))
    return encode(*args)

  monkeypatch.setattr(unfinished, '_encoded', spy)
  found, reads = {}, {}
  for keeps in False, True:
    workflow = workflows.dapo(
      partial_rollout_test.policy(length=12, slots=7),
      dapo_test.never,
      optimizers.adamw(1e-2),
      group_size=GROUP,
      max_rounds=4,
      kl_coef=0.1,
      rollouts=CARRIES,
      keep_kv_cache=keeps,
    )
    batch = tiny.problem(rows=16)
    state = flows.first_state(workflow, KEY, batch)
    shapes = jax.tree.map(jnp.shape, state)
    for i in range(2):
      calls.clear()
      state, info = workflow.step(state, batch, jax.random.key(i))
      jax.effects_barrier()
      assert read(info)['rollout/rounds'] == 4
      reads[keeps, i] = len(calls)
    # Nothing of it is state, or in a checkpoint.
    assert jax.tree.map(jnp.shape, state) == shapes
    found[keeps] = state.carry
  assert reads == {
    (False, 0): 3,
    (False, 1): 4,
    (True, 0): 0,
    (True, 1): 1,
  }
  for one, other in zip(*map(jax.tree.leaves, found.values()), strict=True):
    if jnp.issubdtype(one.dtype, jnp.floating):
      np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)
    else:
      np.testing.assert_array_equal(one, other)


UNKEPT = {
  'no slots': (None, CARRIES, 2),
  'nothing is carried': (7, partial_rollout.partial_rollouts, 2),
  'whole completions': (7, policy_stages.complete, 2),
  'no next round in a step': (7, CARRIES, 1),
}


@pytest.mark.parametrize('name', UNKEPT)
def test_keys_and_values_that_no_round_leaves_are_refused(name):
  slots, rollouts, max_rounds = UNKEPT[name]
  if name == 'nothing is carried':
    rollouts = functools.partial(rollouts, max_carry=0, extra_groups=0)
  with pytest.raises(ValueError, match='leave keep_kv_cache out'):
    workflows.dapo(
      partial_rollout_test.policy(length=12, slots=slots),
      tiny.even,
      optax.sgd(0.0),
      group_size=GROUP,
      max_rounds=max_rounds,
      rollouts=rollouts,
      keep_kv_cache=True,
    )


@functools.cache
def rounds(keeps):
  """Costs of DAPO in two rounds, each of which carries two groups of four."""
  workflow = workflows.dapo(
    tiny.policy(length=12, slots=8),
    tiny.even,
    optax.sgd(0.1),
    group_size=GROUP,
    max_rounds=2,
    rollouts=functools.partial(
      partial_rollout.partial_rollouts, max_carry=1, extra_groups=2
    ),
    keep_kv_cache=keeps,
  )
  flow = unroll.unroll(tiny.trace(workflow, tiny.problem()))
  there = cluster_lib.Cluster(
    engine_cost_test.DEVICE,
    2,
    2,
    engine_cost_test.LINK,
    engine_cost_test.LINK,
  )
  return flow, roofline.Roofline(
    flow, count.of_flow(flow), there, rules.DEFAULT
  )


def test_kept_keys_and_values_take_memory_between_the_rounds_of_a_step():
  kept = jax.eval_shape(lambda: tiny.policy(length=12, slots=8).empty_kept(8))
  size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(kept.layers))
  for axes in (), (('data', 2),):
    most = []
    for keeps in False, True:
      flow, costs = rounds(keeps)
      plan = plan_lib.one_place(
        flow.stages, plan_lib.Placement((0, 1)[: len(axes) + 1], axes)
      )
      most.append(costs.memory(flow, plan, 'all'))
    own = size / (len(axes) + 1)
    more = {name: most[1][name] - most[0][name] for name in most[0]}
    # A round is given some, and returns as many.
    assert more['generate'] == pytest.approx(2 * own, rel=0.01)
    assert 0 < more['accept'] < 1.01 * own
    assert more['gradient'] == 0
    assert engine_cost_test.seconds(*rounds(True)) == (
      engine_cost_test.seconds(*rounds(False))
    )
