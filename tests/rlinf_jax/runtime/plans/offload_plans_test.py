"""An optimizer's moments in host memory change no number of a run."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import claims
import in_memory
from planner.ir import flow as flow_lib
from planner.ir import plan as plan_lib
from rlinf_jax.run_files import checkpoint
from rlinf_jax.runtime import local
import saved
from sharding import offload, slices
import stages
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


@stages.stage('move', 'batch')
def move(w, x):
  return 0.9 * w + x


@stages.stage('act', 'batch')
def act(w, x):
  return w * x


@stages.stage('measure', 'batch')
def measure(w):
  return w.sum()


def step(state, x, key):
  """Replaces one array, and reads both."""
  del key
  made = {'both': act(state['w'], x), 'fixed': act(state['fixed'], x)}
  return state | {'w': move(state['w'], x)}, made


def evaluate(state, x, key):
  """Reads both with a stage of steps, and with one of its own."""
  del key
  return state, {k: (act(w, x), measure(w)) for k, w in state.items()}


@pytest.mark.parametrize(
  'offloaded', [('act',), ('move',), ('act', 'move')], ids=' '.join
)
@pytest.mark.parametrize('measured_at', 'ab')
def test_evaluations_read_what_steps_leave_in_host_memory(
  offloaded, measured_at
):
  state, x = {'w': jnp.ones(4), 'fixed': jnp.arange(4.0)}, jnp.arange(4.0)
  key = jax.random.key(0)
  flows = [flow_lib.trace(fn, state, x, key) for fn in (step, evaluate)]
  sketch = {
    'places': {'a': {'devices': [0]}, 'b': {'devices': [1]}},
    'stages': {'measure': measured_at, '*': 'a'},
    'offload': offloaded,
  }
  plan = plan_lib.parse(sketch, dict.fromkeys(flows[0].stages + ('measure',)))
  runtime = local.LocalRuntime(plan, step=flows[0], evaluate=flows[1])
  in_memory.start(runtime, state)
  for _ in range(2):
    tiny.assert_same_bits(runtime.evaluate(x, key), evaluate(state, x, key)[1])
    state, want = step(state, x, key)
    tiny.assert_same_bits(runtime.step(x, key), want)
  tiny.assert_same_bits(in_memory.state(runtime), state)
  runtime.close()
