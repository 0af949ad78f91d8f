"""Errors of stages name stage, place and step; impossible plans are refused."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import in_memory
from planner.ir import flow, plan
from rlinf_jax.runtime import base, local
from rlinf_jax.state import state_readers
import stages
from tests.rlinf_jax.runtime import small_learner
import tiny


def fail(x):
  raise LookupError('the verifier is away')


def test_an_error_of_a_host_stage_names_stage_place_and_step():
  failing = [small_learner.first_column, small_learner.first_column, fail]
  planned = small_learner.ready(
    small_learner.learner(small_learner.judge(lambda x: failing.pop(0)(x)))
  )
  planned.step(small_learner.BATCH, small_learner.KEY)
  planned.step(small_learner.BATCH, small_learner.KEY)
  message = "Stage judge on place 'all' failed in step 3: the verifier is away"
  with pytest.raises(base.StageError, match=message) as error:
    planned.step(small_learner.BATCH, small_learner.KEY)
  assert isinstance(error.value.__cause__, LookupError)


def test_an_error_of_a_jax_stage_names_stage_place_and_step():
  like = jax.ShapeDtypeStruct((8,), jnp.float32)

  @stages.stage('judge')
  def broken(x):
    return jax.pure_callback(fail, like, x)

  planned = small_learner.ready(small_learner.learner(broken))
  message = (
    "Stage judge on place 'all' failed in step 1: .*the verifier is away"
  )
  with pytest.raises(base.StageError, match=re.compile(message, re.S)):
    planned.step(small_learner.BATCH, small_learner.KEY)


@pytest.mark.parametrize('host', [True, False])
def test_a_stage_that_is_refused_memory_says_what_to_do(host):
  def take(x):
    raise MemoryError('too much')

  @stages.stage('judge')
  def large(x):
    numbers_N = jax.lax.iota(jnp.float32, 1 << 44)
    return jnp.sort(jnp.sin(numbers_N * x.sum()))[:8]

  planned = small_learner.ready(
    small_learner.learner(small_learner.judge(take) if host else large)
  )
  with pytest.raises(base.StageError, match='needs more memory.*micro_batch'):
    planned.step(small_learner.BATCH, small_learner.KEY)


def test_after_a_failure_a_state_must_be_loaded_before_the_next_step():
  answers = [fail, small_learner.first_column]
  planned = small_learner.ready(
    small_learner.learner(small_learner.judge(lambda x: answers.pop(0)(x)))
  )
  for _ in range(2):
    with pytest.raises(base.StageError, match='failed in step 1'):
      planned.step(small_learner.BATCH, small_learner.KEY)
  in_memory.start(planned, small_learner.STATE)
  planned.step(small_learner.BATCH, small_learner.KEY)
  want, _ = small_learner.learner(
    small_learner.judge(small_learner.first_column)
  )(small_learner.STATE, small_learner.BATCH, small_learner.KEY)
  tiny.assert_same_bits(in_memory.state(planned), want)
  assert planned.steps == 1


def test_a_failed_step_holds_no_state_while_another_is_read():
  answers = [fail, small_learner.first_column]
  step = small_learner.learner(small_learner.judge(lambda x: answers.pop(0)(x)))
  given = small_learner.BATCH, small_learner.KEY
  like = jax.eval_shape(lambda: small_learner.STATE)
  graph = flow.trace(step, like, *given)
  planned = local.LocalRuntime(plan.one_place(graph.stages), step=graph)
  held = []

  def first():
    shape = small_learner.STATE['w'].shape
    held.append(sum(x.shape == shape for x in jax.live_arrays()))
    return jax.tree.map(jnp.zeros_like, like)

  planned.start(state_readers.FirstState(first))
  with pytest.raises(base.StageError):
    planned.step(*given)
  planned.start(state_readers.FirstState(first))
  assert held[0] == held[1]


@pytest.mark.parametrize(
  'output',
  [np.zeros(7, np.float32), np.zeros(8), None],
  ids=['shape', 'type', 'nothing'],
)
def test_a_host_stage_with_other_outputs_than_declared_is_named(output):
  planned = small_learner.ready(
    small_learner.learner(small_learner.judge(lambda x: output))
  )
  message = (
    "judge on place 'all' failed in step 1: Stage judge declares outputs"
  )
  with pytest.raises(base.StageError, match=message):
    planned.step(small_learner.BATCH, small_learner.KEY)


def test_a_batch_of_another_shape_is_refused_by_the_stage_that_reads_it():
  planned = small_learner.ready(
    small_learner.learner(small_learner.judge(small_learner.first_column))
  )
  with pytest.raises(base.StageError, match=r'Stage \w+ .*failed in step 1'):
    planned.step(small_learner.BATCH[:4], small_learner.KEY)


def test_a_place_on_missing_devices_is_refused():
  placement = plan.Placement((7, 8), (('data', 2),))
  with pytest.raises(ValueError, match="'all' wants device 8, .* has 8: name"):
    small_learner.ready(
      small_learner.learner(small_learner.judge(small_learner.first_column)),
      placement=placement,
    )


def test_rows_that_a_mesh_cannot_share_are_refused_before_anything_runs():
  message = r"input.0 on place 'all': Dimension B .* size 6, which 8 devices"
  with pytest.raises(ValueError, match=message):
    small_learner.ready(
      small_learner.learner(small_learner.judge(fail)),
      batch=small_learner.BATCH[:6],
      placement=tiny.PLACES['data'],
    )


def test_micro_batches_that_a_mesh_cannot_share_are_refused():
  message = r"input.0 on place 'all': Dimension B .* size 4, which 8 devices"
  with pytest.raises(ValueError, match=message):
    small_learner.ready(
      small_learner.learner(small_learner.judge(fail)),
      placement=tiny.PLACES['data'],
      micro_batch={'learn': 4},
    )


def paired(rows, stage, carry):
  """The flow of a stage that compares pairs of rows, and its plan and batch."""

  def step(state, batch, key):
    del key
    return state, stage(state, batch[0])

  batch = (np.arange(2.0 * rows, dtype=np.float32).reshape(rows, 2) ** 2,)
  graph = flow.trace(step, carry, batch, small_learner.KEY)
  return graph, plan.one_place(graph.stages, tiny.PLACES['data']), batch


def above_mean(params, x):
  del params
  x = x.reshape(-1, 2, 2)
  return (x - x.mean(1, keepdims=True)).reshape(-1, 2)


PAIRS = stages.Stage(above_mean, 'pairs', unbatched=(0,), group_size=2)


@pytest.mark.parametrize('rows', [8, 16])
def test_whole_groups_of_a_model_that_a_mesh_would_divide_are_refused(rows):
  params = {'kernel_DF': np.ones((2, 2), np.float32)}
  graph, planned, _ = paired(rows, PAIRS, params)
  if rows == 16:
    local.LocalRuntime(planned, step=graph)
    return
  with pytest.raises(ValueError, match='pairs takes 8 rows .* 4 groups of 2'):
    local.LocalRuntime(planned, step=graph)


@pytest.mark.parametrize('micro_batch', [{}, {'pairs': 4}])
def test_whole_groups_without_a_model_are_computed_by_every_device(micro_batch):
  graph, planned, batch = paired(8, PAIRS, np.ones((), np.float32))
  planned = dataclasses.replace(planned, micro_batch=micro_batch)
  runtime = local.LocalRuntime(planned, step=graph)
  in_memory.start(runtime, np.ones((), np.float32))
  got = runtime.step(batch, small_learner.KEY)
  np.testing.assert_array_equal(got, above_mean((), batch[0]))
