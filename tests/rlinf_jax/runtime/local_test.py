import functools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import claims
from planner.ir import flow, plan
from rlinf_jax.run import flows
from rlinf_jax.runtime import base, local, timeline
import stages
from stages import workflows
from stages.learn import optimizers
import tiny


def local_of(workflow, batch, held_out=None, **kwargs):
  """A runtime of a workflow on one place."""
  step = tiny.trace(workflow, batch)
  evaluate = None
  if held_out is not None:
    evaluate = tiny.trace_evaluation(workflow, held_out)
  names = dict.fromkeys(step.stages + (evaluate.stages if evaluate else ()))
  return local.LocalRuntime(
    plan.one_place(names, **kwargs), step=step, evaluate=evaluate
  )


def grpo(verify, **kwargs):
  return workflows.grpo(
    tiny.policy(), verify, optimizers.adamw(1e-2), group_size=4, **kwargs
  )


def run(workflow, batches, held_out, steps=3):
  """Runs a workflow eagerly and planned; returns pairs to compare."""
  keys = list(jax.random.split(jax.random.key(7), steps))
  state = workflow.init(jax.random.key(0))
  first = tiny.arrays(state)
  planned = local_of(workflow, batches[0], held_out)
  planned.load(state)
  pairs = []
  before = planned.evaluate(held_out, keys[0])
  pairs.append((before, workflow.evaluate(state, held_out, keys[0])))
  planned.timeline.take()
  spans = []
  for batch, key in zip(batches, keys, strict=True):
    got = planned.step(batch, key)
    spans.append(planned.timeline.take())
    state, want = workflow.step(state, batch, key)
    pairs.append((got, want))
    pairs.append((tiny.arrays(planned.state()), tiny.arrays(state)))
  return types.SimpleNamespace(
    workflow=workflow,
    planned=planned,
    state=state,
    first=first,
    pairs=pairs,
    spans=spans,
    held_out=held_out,
    keys=keys,
  )


@functools.cache
def grpo_run():
  return run(
    grpo(tiny.even_on_host, kl_coef=0.1, num_minibatches=2),
    [tiny.problem(seed=i) for i in range(3)],
    tiny.problem(4, seed=9),
  )


OPTIONS = {
  'plain': {},
  'minibatches': {'num_minibatches': 2},
  'kl': {'kl_coef': 0.1},
}


@pytest.mark.slow
@pytest.mark.parametrize('name', claims.some(OPTIONS, ['plain']))
def test_planned_grpo_is_eager_grpo_bit_for_bit(name):
  batches = [tiny.problem(seed=i) for i in range(3)]
  for got, want in run(
    grpo(tiny.even, **OPTIONS[name]), batches, tiny.problem(4, seed=9)
  ).pairs:
    tiny.assert_same_bits(got, want)


@pytest.mark.slow
def test_planned_grpo_with_all_options_is_eager_grpo_bit_for_bit():
  for got, want in grpo_run().pairs:
    tiny.assert_same_bits(got, want)


@pytest.mark.slow
def test_planned_sft_is_eager_sft_bit_for_bit():
  sft = workflows.sft(tiny.policy(), tiny.even, optimizers.adamw(1e-2))
  batches = [tiny.examples(seed=i) for i in range(3)]
  for got, want in run(sft, batches, tiny.problem(4, seed=9)).pairs:
    tiny.assert_same_bits(got, want)


@pytest.mark.slow
def test_the_reference_is_not_overwritten_with_the_actor_it_started_from():
  done = grpo_run()
  tiny.assert_same_bits(
    done.planned.state().reference,
    done.workflow.init(jax.random.key(0)).reference,
  )
  for name, x in tiny.arrays(done.planned.state().actor.params).items():
    assert not np.array_equal(x, done.first[f'.actor.params{name}']), name


@pytest.mark.slow
def test_an_evaluation_leaves_the_state_as_it_was():
  done = grpo_run()
  before, steps = tiny.arrays(done.planned.state()), done.planned.steps
  one, two = (done.planned.evaluate(done.held_out, done.keys[0]) for _ in '12')
  tiny.assert_same_bits(one, two)
  tiny.assert_same_bits(
    one, done.workflow.evaluate(done.state, done.held_out, done.keys[0])
  )
  tiny.assert_same_bits(done.planned.state(), before)
  assert done.planned.steps == steps == 3
  # The run is shared between tests: remove these spans.
  assert 'answer' in timeline.seconds(done.planned.timeline.take())


@pytest.mark.slow
def test_the_timeline_holds_each_call_in_order():
  done = grpo_run()
  calls = [node.name for node in done.planned.lowered['step'].flow.nodes]
  ends = 0.0
  for step, spans in enumerate(done.spans, 1):
    assert [span.stage for span in spans] == calls
    assert {(span.step, span.place) for span in spans} == {(step, 'all')}
    for span in spans:
      assert ends <= span.start <= span.end
      ends = span.end
    assert set(timeline.seconds(spans)) == set(calls)
    total = sum(timeline.seconds(spans).values())
    assert total == pytest.approx(sum(s.end - s.start for s in spans))
  assert done.planned.timeline.take() == []


@pytest.mark.parametrize('seed', range(12))
def test_random_steps_planned_are_eager_bit_for_bit(seed):
  step = tiny.random_step(seed)
  rng = np.random.default_rng(seed)

  def draw(n):
    return [jnp.asarray(rng.normal(size=4), jnp.float32) for _ in range(n)]

  state, batch = draw(rng.integers(1, 5)), draw(rng.integers(1, 3))
  graph = flow.trace(step, state, batch, KEY)
  planned = local.LocalRuntime(plan.one_place(graph.stages), step=graph)
  planned.load(state)
  pairs = []
  for _ in range(3):
    batch = draw(len(batch))
    got = planned.step(batch, KEY)
    state, want = step(state, batch, KEY)
    tiny.assert_same_bits(planned.state(), state)
    pairs.append((got, want))
  for got, want in pairs:  # Later steps have not overwritten results.
    tiny.assert_same_bits(got, want)


# A small learner: parameters move towards rewarded rows.


@stages.stage('learn', 'sum', unbatched=(0,))
def learn(state, x, reward):
  gap = x - state['w']
  return {'w': (reward[:, None] * gap).sum(0, keepdims=True)}


@stages.stage('apply', 'batch')
def apply(state, gradient):
  m = 0.9 * state['m'] + gradient['w']
  return {'w': state['w'] + 0.1 * m, 'm': m}


def judge(fn, like=lambda x: jax.ShapeDtypeStruct(x.shape[:1], jnp.float32)):
  return stages.Stage(fn, 'judge', host=True, out_shapes=like)


def first_column(x):
  return x[:, 0] + np.float32(0)


def learner(judge):
  def step(state, x, key):
    del key
    reward = judge(x)
    return apply(state, learn(state, x, reward)), {'reward': reward}

  return step


def ready(step, state=None, batch=None, **kwargs):
  """A runtime of a step, with its state loaded."""
  state = STATE if state is None else state
  graph = flow.trace(step, state, BATCH if batch is None else batch, KEY)
  planned = local.LocalRuntime(
    plan.one_place(graph.stages, **kwargs), step=graph
  )
  planned.load(state)
  return planned


KEY = jax.random.key(0)
STATE = {'w': jnp.zeros((1, 512)), 'm': jnp.ones((1, 512))}
BATCH = jnp.asarray(np.random.default_rng(0).normal(size=(8, 512)), jnp.float32)


def test_a_step_overwrites_a_copy_of_the_loaded_state():
  planned = ready(learner(judge(first_column)))
  before = tiny.arrays(STATE)
  planned.step(BATCH, KEY)
  tiny.assert_same_bits(STATE, before)
  assert not np.array_equal(planned.state()['w'], STATE['w'])


def test_an_array_that_is_two_parts_of_a_state_is_loaded_as_two():
  one = jnp.ones((1, 512))
  planned = ready(learner(judge(first_column)), {'w': one, 'm': one})
  want = {'w': one, 'm': one}
  for _ in range(2):
    want, _ = learner(judge(first_column))(want, BATCH, KEY)
    planned.step(BATCH, KEY)
  tiny.assert_same_bits(planned.state(), want)


def test_memory_of_the_old_state_and_of_gradients_is_reused():
  planned = ready(learner(judge(first_column)))
  before = [x.unsafe_buffer_pointer() for x in planned.state().values()]
  old = planned.state()['w']
  planned.step(BATCH, KEY)
  after = [x.unsafe_buffer_pointer() for x in planned.state().values()]
  assert set(before) == set(after)
  assert old.is_deleted()


def test_a_state_read_as_numpy_outlives_the_next_step():
  planned = ready(learner(judge(first_column)))
  view = np.asarray(planned.state()['w'])
  kept = view.copy()
  planned.step(BATCH, KEY)
  np.testing.assert_array_equal(view, kept)


def test_a_batch_is_never_overwritten():
  planned = ready(learner(judge(first_column)))
  for _ in range(2):
    planned.step(BATCH, KEY)
  assert not BATCH.is_deleted()


def test_a_state_loaded_again_starts_again():
  planned = ready(learner(judge(first_column)))
  planned.step(BATCH, KEY)
  once = tiny.arrays(planned.state())
  planned.step(BATCH, KEY)
  planned.load(STATE, steps=5)
  assert planned.steps == 5
  planned.step(BATCH, KEY)
  tiny.assert_same_bits(planned.state(), once)
  assert {span.step for span in planned.timeline.take()[-3:]} == {6}


def fail(x):
  raise LookupError('the verifier is away')


def test_an_error_of_a_host_stage_names_stage_place_and_step():
  failing = [first_column, first_column, fail]
  planned = ready(learner(judge(lambda x: failing.pop(0)(x))))
  planned.step(BATCH, KEY)
  planned.step(BATCH, KEY)
  message = "Stage judge on place 'all' failed in step 3: the verifier is away"
  with pytest.raises(base.StageError, match=message) as error:
    planned.step(BATCH, KEY)
  assert isinstance(error.value.__cause__, LookupError)


def test_an_error_of_a_jax_stage_names_stage_place_and_step():
  like = jax.ShapeDtypeStruct((8,), jnp.float32)

  @stages.stage('judge')
  def broken(x):
    return jax.pure_callback(fail, like, x)

  planned = ready(learner(broken))
  message = (
    "Stage judge on place 'all' failed in step 1: .*the verifier is away"
  )
  with pytest.raises(base.StageError, match=re.compile(message, re.S)):
    planned.step(BATCH, KEY)


def test_after_a_failure_a_state_must_be_loaded_before_the_next_step():
  answers = [fail, first_column]
  planned = ready(learner(judge(lambda x: answers.pop(0)(x))))
  for _ in range(2):
    with pytest.raises(base.StageError, match='failed in step 1'):
      planned.step(BATCH, KEY)
  planned.load(STATE)
  planned.step(BATCH, KEY)
  want, _ = learner(judge(first_column))(STATE, BATCH, KEY)
  tiny.assert_same_bits(planned.state(), want)
  assert planned.steps == 1


@pytest.mark.parametrize(
  'output',
  [np.zeros(7, np.float32), np.zeros(8), None],
  ids=['shape', 'type', 'nothing'],
)
def test_a_host_stage_with_other_outputs_than_declared_is_named(output):
  planned = ready(learner(judge(lambda x: output)))
  message = (
    "judge on place 'all' failed in step 1: Stage judge declares outputs"
  )
  with pytest.raises(base.StageError, match=message):
    planned.step(BATCH, KEY)


def test_a_batch_of_another_shape_is_refused_by_the_stage_that_reads_it():
  planned = ready(learner(judge(first_column)))
  with pytest.raises(base.StageError, match=r'Stage \w+ .*failed in step 1'):
    planned.step(BATCH[:4], KEY)


def test_a_place_on_missing_devices_is_refused():
  placement = plan.Placement((7, 8), (('data', 2),))
  with pytest.raises(ValueError, match="'all' wants device 8, .* has 8: name"):
    ready(learner(judge(first_column)), placement=placement)


def test_rows_that_a_mesh_cannot_share_are_refused_before_anything_runs():
  message = r"input.0 on place 'all': Dimension B .* size 6, which 8 devices"
  with pytest.raises(ValueError, match=message):
    ready(learner(judge(fail)), batch=BATCH[:6], placement=tiny.PLACES['data'])


def test_micro_batches_that_a_mesh_cannot_share_are_refused():
  message = r"input.0 on place 'all': Dimension B .* size 4, which 8 devices"
  with pytest.raises(ValueError, match=message):
    ready(
      learner(judge(fail)),
      placement=tiny.PLACES['data'],
      micro_batch={'learn': 4},
    )


def test_groups_that_a_mesh_would_split_are_refused():
  # Mathematically it is fine; XLA 0.10.2 computes wrong numbers.
  pair = stages.Stage(lambda x: x, 'pair', group_size=2)

  def step(state, batch, key):
    del key
    return state, pair(batch[0])

  for rows in (8, 16):
    batch = (np.ones((rows, 2), np.float32),)
    graph = flow.trace(step, np.ones(()), batch, KEY)
    planned = plan.one_place(graph.stages, tiny.PLACES['data'])
    if rows == 8:
      with pytest.raises(
        ValueError, match='pair takes 8 rows .* 4 groups of 2'
      ):
        local.LocalRuntime(planned, step=graph)
    else:
      local.LocalRuntime(planned, step=graph)


def test_placing_changes_no_bit():
  step = learner(judge(first_column))
  states = []
  for device in (0, 5):
    planned = ready(step, placement=plan.Placement((device,)))
    for _ in range(2):
      info = planned.step(BATCH, KEY)
    states.append(tiny.arrays(planned.state()))
    for x in jax.tree.leaves((planned.state(), info)):
      assert x.devices() == {jax.devices()[device]}
  tiny.assert_same_bits(*states)


def test_two_calls_of_a_stage_may_have_outputs_with_and_without_rows():
  # The output of one of two equal calls is read as rows, and thus sharded.
  turn = stages.Stage(lambda x: x % 7, 'turn', 'batch')
  total = stages.Stage(lambda x: x.sum(), 'total', 'sum')
  norm = stages.Stage(lambda x: (x * x).sum(), 'norm', 'batch')

  def step(state, x, key):
    return state, {'total': total(turn(state)), 'norm': norm(turn(state))}

  state = jnp.arange(64.0).reshape(8, 8)
  planned = ready(step, state, placement=tiny.PLACES['data'])
  got, (_, want) = planned.step(BATCH, KEY), step(state, BATCH, KEY)
  tiny.assert_same_bits(got, want)  # Sums of whole numbers are exact.


def test_a_state_keeps_the_sharding_of_the_plan_from_load_to_step():
  state = {'up_DF': jnp.ones((32, 64)), 'm': jnp.ones(3)}
  add = stages.Stage(
    lambda state, x: state | {'up_DF': state['up_DF'] + x.sum()}, 'add', 'batch'
  )
  planned = ready(
    lambda state, x, key: (add(state, x), ()),
    state,
    placement=tiny.PLACES['mixed'],
  )
  want = jax.sharding.PartitionSpec('fsdp', 'tensor')
  assert planned.state()['up_DF'].sharding.spec == want
  planned.step(BATCH, KEY)
  assert planned.state()['up_DF'].sharding.spec == want
  assert planned.state()['m'].sharding.is_fully_replicated


@pytest.fixture
def fetched(monkeypatch):
  """Shapes of the arrays that were copied to the host, in order."""
  shapes, kind = [], type(jnp.zeros(()))

  def counting(fetch):
    def counted(x, *args, **kwargs):
      if isinstance(x, jax.Array):
        shapes.append(x.shape)
      return fetch(x, *args, **kwargs)

    return counted

  # NumPy reads CPU memory itself; all other copies use _value.
  monkeypatch.setattr(kind, '_value', property(counting(kind._value.fget)))
  monkeypatch.setattr(np, 'asarray', counting(np.asarray))
  monkeypatch.setattr(np, 'array', counting(np.array))
  return shapes


def test_only_inputs_of_host_stages_are_copied_to_the_host(fetched):
  planned = ready(learner(judge(first_column)))
  planned.step(BATCH, KEY)
  fetched.clear()
  for _ in range(3):
    info = planned.step(BATCH, KEY)
  assert fetched == [BATCH.shape] * 3
  jax.device_get(info)
  assert fetched == [BATCH.shape] * 3 + [(8,)]


def test_the_fixture_counts_copies_to_the_host(fetched):
  x = jnp.ones(3) + 1
  float(x[0])
  assert fetched == [()]
  for fetch in (np.asarray, np.array, jax.device_get, lambda x: x.tolist()):
    fetched.clear()
    fetch(x + 1)
    assert fetched == [(3,)]


def test_a_stage_is_compiled_once_however_often_a_flow_calls_it():
  calls = []

  @stages.stage('turn', 'batch')
  def turn(x):
    calls.append(x)  # When traced.
    return jnp.sin(x)

  def step(state, x, key):
    for _ in range(5):
      state = turn(state)
    return state, ()

  planned = ready(step, jnp.ones((2, 3)))
  planned.step(BATCH, KEY)
  planned.step(BATCH, KEY)
  assert len(calls) == 1


def test_spans_add_up_by_stage():
  line = timeline.Timeline()
  for stage in 'aba':
    line.add(1, 'all', 'run', stage, line.now())
  spans = line.take()
  assert [span.stage for span in spans] == ['a', 'b', 'a']
  assert set(timeline.seconds(spans)) == {'a', 'b'}
  assert line.take() == []


@pytest.mark.slow
def test_batches_of_other_shapes_are_compiled_once_each_and_change_no_bit():
  workflow = grpo(tiny.even_on_host, num_minibatches=2)
  batches = [tiny.problem(columns=n, seed=n) for n in (7, 3, 7, 3, 5)]
  planned = local.LocalRuntime(
    plan.one_place(tiny.trace(workflow, batches[0]).stages),
    step=tiny.trace(workflow, batches[0]),
    retrace=functools.partial(flows.trace_step, workflow),
  )
  state = workflow.init(jax.random.key(0))
  planned.load(state)
  notices = []
  for i, batch in enumerate(batches):
    key = jax.random.key(i)
    got = planned.step(batch, key)
    notices += planned.notices()
    state, want = workflow.step(state, batch, key)
    tiny.assert_same_bits(got, want)
  tiny.assert_same_bits(tiny.arrays(planned.state()), tiny.arrays(state))
  assert [x.split(': ')[1] for x in notices] == [
    '2 shapes so far.',
    '3 shapes so far.',
  ]
