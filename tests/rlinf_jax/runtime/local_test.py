"""A runtime of threads: memory it reuses, copies it makes, bits it keeps."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import in_memory
from planner.ir import flow, plan
from rlinf_jax.runtime import local
import stages
from tests.rlinf_jax.runtime import small_learner
import tiny


@pytest.mark.parametrize('seed', range(12))
def test_random_steps_planned_are_eager_bit_for_bit(seed):
  step = tiny.random_step(seed)
  rng = np.random.default_rng(seed)

  def draw(n):
    return [jnp.asarray(rng.normal(size=4), jnp.float32) for _ in range(n)]

  state, batch = draw(rng.integers(1, 5)), draw(rng.integers(1, 3))
  graph = flow.trace(step, state, batch, small_learner.KEY)
  planned = local.LocalRuntime(plan.one_place(graph.stages), step=graph)
  in_memory.start(planned, state)
  pairs = []
  for _ in range(3):
    batch = draw(len(batch))
    got = planned.step(batch, small_learner.KEY)
    state, want = step(state, batch, small_learner.KEY)
    tiny.assert_same_bits(in_memory.state(planned), state)
    pairs.append((got, want))
  for got, want in pairs:  # Later steps have not overwritten results.
    tiny.assert_same_bits(got, want)


# A small learner: parameters move towards rewarded rows.


def test_a_step_overwrites_a_copy_of_the_loaded_state():
  planned = small_learner.ready(
    small_learner.learner(small_learner.judge(small_learner.first_column))
  )
  before = tiny.arrays(small_learner.STATE)
  planned.step(small_learner.BATCH, small_learner.KEY)
  tiny.assert_same_bits(small_learner.STATE, before)
  assert not np.array_equal(
    in_memory.state(planned)['w'], small_learner.STATE['w']
  )


def test_an_array_that_is_two_parts_of_a_state_is_loaded_as_two():
  one = jnp.ones((1, 512))
  planned = small_learner.ready(
    small_learner.learner(small_learner.judge(small_learner.first_column)),
    {'w': one, 'm': one},
  )
  want = {'w': one, 'm': one}
  for _ in range(2):
    want, _ = small_learner.learner(
      small_learner.judge(small_learner.first_column)
    )(want, small_learner.BATCH, small_learner.KEY)
    planned.step(small_learner.BATCH, small_learner.KEY)
  tiny.assert_same_bits(in_memory.state(planned), want)


def test_memory_of_the_old_state_and_of_gradients_is_reused():
  planned = small_learner.ready(
    small_learner.learner(small_learner.judge(small_learner.first_column))
  )
  before = [
    x.unsafe_buffer_pointer() for x in in_memory.state(planned).values()
  ]
  old = in_memory.state(planned)['w']
  planned.step(small_learner.BATCH, small_learner.KEY)
  after = [x.unsafe_buffer_pointer() for x in in_memory.state(planned).values()]
  assert set(before) == set(after)
  assert old.is_deleted()


def test_a_state_read_as_numpy_outlives_the_next_step():
  planned = small_learner.ready(
    small_learner.learner(small_learner.judge(small_learner.first_column))
  )
  view = np.asarray(in_memory.state(planned)['w'])
  kept = view.copy()
  planned.step(small_learner.BATCH, small_learner.KEY)
  np.testing.assert_array_equal(view, kept)


def test_a_state_that_an_evaluation_returns_outlives_the_next_step():
  def step(state, x, key):
    return small_learner.apply(state, {'w': state['m']}), ()

  given = small_learner.STATE, small_learner.BATCH, small_learner.KEY
  flows = [
    flow.trace(fn, *given) for fn in (step, lambda state, *_: (state, state))
  ]
  planned = local.LocalRuntime(
    plan.one_place(flows[0].stages), step=flows[0], evaluate=flows[1]
  )
  in_memory.start(planned, small_learner.STATE)
  found = planned.evaluate(*given[1:])
  planned.step(*given[1:])
  tiny.assert_same_bits(found, small_learner.STATE)


def test_an_old_value_is_freed_after_its_last_use():
  seen, shape = [], (7, 11)

  def count(x):
    seen.append(sum(x.shape == shape for x in jax.live_arrays()))
    return x

  before = sum(x.shape == shape for x in jax.live_arrays())
  shrink = stages.Stage(lambda x: x.sum(0), 'shrink', 'batch')
  look = stages.Stage(count, 'look', 'batch', host=True, out_shapes=lambda x: x)
  spread = stages.Stage(lambda x: jnp.tile(x, (7, 1)), 'spread', 'batch')
  planned = small_learner.ready(
    lambda x, *_: (spread(look(shrink(x))), ()), np.ones(shape, np.float32)
  )
  for _ in range(2):
    planned.step(small_learner.BATCH, small_learner.KEY)
  assert seen == [before] * 2


def test_a_batch_is_never_overwritten():
  planned = small_learner.ready(
    small_learner.learner(small_learner.judge(small_learner.first_column))
  )
  for _ in range(2):
    planned.step(small_learner.BATCH, small_learner.KEY)
  assert not small_learner.BATCH.is_deleted()


def test_a_state_loaded_again_starts_again():
  planned = small_learner.ready(
    small_learner.learner(small_learner.judge(small_learner.first_column))
  )
  planned.step(small_learner.BATCH, small_learner.KEY)
  once = tiny.arrays(in_memory.state(planned))
  planned.step(small_learner.BATCH, small_learner.KEY)
  in_memory.start(planned, small_learner.STATE, steps=5)
  assert planned.steps == 5
  planned.step(small_learner.BATCH, small_learner.KEY)
  tiny.assert_same_bits(in_memory.state(planned), once)
  assert {span.step for span in planned.timeline.take()[-3:]} == {6}


def test_a_closed_runtime_holds_no_state():
  def arrays():
    shape = small_learner.STATE['w'].shape
    return sum(x.shape == shape for x in jax.live_arrays())

  before = arrays()
  planned = small_learner.ready(
    small_learner.learner(small_learner.judge(small_learner.first_column))
  )
  planned.step(small_learner.BATCH, small_learner.KEY)
  assert arrays() > before
  planned.close()
  assert arrays() == before


def test_placing_changes_no_bit():
  step = small_learner.learner(small_learner.judge(small_learner.first_column))
  states = []
  for device in (0, 5):
    planned = small_learner.ready(step, placement=plan.Placement((device,)))
    for _ in range(2):
      info = planned.step(small_learner.BATCH, small_learner.KEY)
    states.append(tiny.arrays(in_memory.state(planned)))
    for x in jax.tree.leaves((in_memory.state(planned), info)):
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
  planned = small_learner.ready(step, state, placement=tiny.PLACES['data'])
  got, (_, want) = (
    planned.step(small_learner.BATCH, small_learner.KEY),
    step(state, small_learner.BATCH, small_learner.KEY),
  )
  tiny.assert_same_bits(got, want)  # Sums of whole numbers are exact.


def test_no_memory_is_reused_for_a_value_that_is_laid_out_otherwise():
  twice = stages.Stage(lambda x: 2 * x, 'twice')
  turn = stages.Stage(lambda x: x[::-1], 'turn', 'batch')

  def step(state, *_):
    both = twice(state)
    return turn(state), both  # Rows are sharded, and what `turn` makes is not.

  state = np.arange(16, dtype=np.float32).reshape(8, 2)
  with warnings.catch_warnings(record=True) as found:
    warnings.simplefilter('always')
    planned = small_learner.ready(step, state, placement=tiny.PLACES['data'])
    planned.step(small_learner.BATCH, small_learner.KEY)
  assert not [w for w in found if 'donated' in str(w.message)]
  np.testing.assert_array_equal(in_memory.state(planned), state[::-1])


@pytest.mark.parametrize('grains', [('row', 'batch'), ('batch', 'row')])
def test_steps_and_evaluations_may_read_a_state_with_and_without_rows(grains):
  add, multiply = (
    stages.Stage(fn, name, grain)
    for fn, name, grain in zip(
      (jnp.add, jnp.multiply), ('add', 'multiply'), grains, strict=True
    )
  )
  state, x = jnp.arange(16.0).reshape(8, 2), small_learner.BATCH[:, :2]
  given = state, x, small_learner.KEY
  step = flow.trace(lambda state, x, _: (add(state, x), ()), *given)
  evaluate = flow.trace(lambda state, x, _: (state, multiply(state, x)), *given)
  planned = local.LocalRuntime(
    plan.one_place((*step.stages, *evaluate.stages), tiny.PLACES['data']),
    step=step,
    evaluate=evaluate,
  )
  in_memory.start(planned, state)
  for _ in range(2):
    np.testing.assert_array_equal(planned.evaluate(*given[1:]), state * x)
    planned.step(*given[1:])
    state += x
  np.testing.assert_array_equal(in_memory.state(planned), state)


def test_a_state_keeps_the_sharding_of_the_plan_from_load_to_step():
  state = {'up_DF': jnp.ones((32, 64)), 'm': jnp.ones(3)}
  add = stages.Stage(
    lambda state, x: state | {'up_DF': state['up_DF'] + x.sum()}, 'add', 'batch'
  )
  planned = small_learner.ready(
    lambda state, x, key: (add(state, x), ()),
    state,
    placement=tiny.PLACES['mixed'],
  )
  want = jax.sharding.PartitionSpec('fsdp', 'tensor')
  assert in_memory.state(planned)['up_DF'].sharding.spec == want
  planned.step(small_learner.BATCH, small_learner.KEY)
  assert in_memory.state(planned)['up_DF'].sharding.spec == want
  assert in_memory.state(planned)['m'].sharding.is_fully_replicated


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
  planned = small_learner.ready(
    small_learner.learner(small_learner.judge(small_learner.first_column))
  )
  planned.step(small_learner.BATCH, small_learner.KEY)
  fetched.clear()
  for _ in range(3):
    info = planned.step(small_learner.BATCH, small_learner.KEY)
  assert fetched == [small_learner.BATCH.shape] * 3
  jax.device_get(info)
  assert fetched == [small_learner.BATCH.shape] * 3 + [(8,)]


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

  planned = small_learner.ready(step, jnp.ones((2, 3)))
  planned.step(small_learner.BATCH, small_learner.KEY)
  planned.step(small_learner.BATCH, small_learner.KEY)
  assert len(calls) == 1
