"""An optimizer's moments in host memory change no number of a run."""

import functools

import jax
import numpy as np
import pytest

import claims
import in_memory
from planner.ir import plan as plan_lib
from rlinf_jax.run_files import checkpoint
from rlinf_jax.runtime import local
import saved
from sharding import offload, slices
from stages import workflows
from stages.learn import optimizers
import tiny

STEPS = 3


@pytest.fixture(autouse=True)
def small_slices(monkeypatch):
  """Slices of a row each, so that every array has several."""
  monkeypatch.setattr(slices, 'SLICE', 1)


@functools.cache
def grpo(**kwargs):
  adamw = optimizers.adamw(3e-2, weight_decay=0.1, warmup_steps=2)
  return workflows.grpo(tiny.policy(), tiny.even, adamw, group_size=4, **kwargs)


def runtime_of(workflow, place, offloaded):
  step = tiny.trace(workflow, tiny.problem())
  chosen = plan_lib.Plan(
    {'all': tiny.PLACES[place]},
    dict.fromkeys(step.stages, 'all'),
    offload=('apply',) if offloaded else (),
  )
  return local.LocalRuntime(chosen, step=step)


def steps(runtime, first=0):
  """Takes some steps; returns their metrics."""
  return [
    tiny.arrays(runtime.step(tiny.problem(seed=i), jax.random.key(i)))
    for i in range(first, STEPS)
  ]


def moments(state):
  return [x for x in jax.tree.leaves(state.actor.opt_state) if x.ndim]


def kinds(arrays):
  return {x.sharding.memory_kind for x in arrays}


@pytest.mark.slow
@pytest.mark.parametrize(
  'place, num_minibatches',
  claims.some(
    [('one', 2), ('fsdp', 1), ('mixed', 1)], keep=[('one', 2), ('mixed', 1)]
  ),
)
def test_moments_in_host_memory_change_no_bit(place, num_minibatches):
  workflow = grpo(num_minibatches=num_minibatches)
  found = []
  for offloaded in (False, True):
    runtime = runtime_of(workflow, place, offloaded)
    in_memory.start(runtime, workflow.init(jax.random.key(0)))
    infos = steps(runtime)
    state = in_memory.state(runtime)
    there = offload.HOST if offloaded else offload.DEVICE
    assert kinds(moments(state)) == {there}
    assert kinds(jax.tree.leaves(state.actor.params)) == {offload.DEVICE}
    found.append((infos, tiny.arrays(state)))
    runtime.close()
  (infos, state), (others, other) = found
  tiny.assert_same_bits(other, state)
  for one, two in zip(others, infos, strict=True):
    tiny.assert_same_bits(one, two)


@pytest.mark.slow
def test_a_checkpoint_keeps_moments_in_host_memory(tmp_path):
  workflow = grpo()
  runtime = runtime_of(workflow, 'fsdp', True)
  in_memory.start(runtime, workflow.init(jax.random.key(0)))
  runtime.step(tiny.problem(seed=0), jax.random.key(0))
  checkpoints = checkpoint.Checkpoints(tmp_path, keep=1)
  source = {'seed': np.array(0)}
  checkpoints.save(1, runtime, source, {})
  want = steps(runtime, 1), tiny.arrays(in_memory.state(runtime))
  checkpoints.close()
  again = runtime_of(workflow, 'fsdp', True)
  checkpoints = checkpoint.Checkpoints(tmp_path, keep=1)
  start, _ = saved.load(checkpoints, in_memory.state(runtime), source)
  again.start(start.state, start.step)
  assert kinds(moments(in_memory.state(again))) == {offload.HOST}
  got = steps(again, 1), tiny.arrays(in_memory.state(again))
  for one, two in zip((*got[0], got[1]), (*want[0], want[1]), strict=True):
    tiny.assert_same_bits(one, two)
  for some in (runtime, again):
    some.close()


@pytest.mark.slow
def test_loading_a_state_leaves_the_callers_arrays_alone():
  workflow = grpo()
  one, other = (runtime_of(workflow, 'one', True) for _ in range(2))
  in_memory.start(one, workflow.init(jax.random.key(0)))
  state = in_memory.state(one)
  before = [np.array(x) for x in moments(state)]
  in_memory.start(other, state)
  other.step(tiny.problem(), jax.random.key(0))
  for x, y in zip(moments(state), before, strict=True):
    np.testing.assert_array_equal(x, y)
  for some in (one, other):
    some.close()
