"""Places of one process: they overlap, and they stop together at a failure."""

import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import in_memory
from planner.ir import flow as flow_lib
from planner.ir import plan as plan_lib
from rlinf_jax.runtime import base, local
from rlinf_jax.runtime.places import place as place_lib
import stages

NAMES = ('act', 'judge', 'learn', 'apply')
KEY = jax.random.key(0)
BATCH = np.ones((8, 2), np.float32)
WIDE = 1 << 16


def rows_of(x):
  return jax.ShapeDtypeStruct(x.shape, jnp.float32)


def sleeper(name, seconds, fn, **kwargs):
  """A host stage that takes `seconds` for the whole batch."""

  def run(*args):
    time.sleep(seconds * len(args[-1]) / len(BATCH))
    return fn(*args)

  return stages.Stage(run, name, host=True, **kwargs)


def workflow(act=0.0, fail=None, during=None):
  """act → judge → learn → apply, with simple numbers.

  Args:
    act: seconds that the first takes for the whole batch.
    fail: the stage that raises.
    during: what is called with the name of a stage as it computes.
  """

  def broken(name, fn):
    def run(*args):
      if fail == name:
        raise LookupError('it is away')
      if during is not None:
        during(name)
      return fn(*args)

    return run

  generate = sleeper(
    'act',
    act,
    broken('act', lambda w, x: (x + w[None]).astype(np.float32)),
    unbatched=(0,),
    out_shapes=lambda w, x: rows_of(x),
  )
  judge = stages.Stage(
    broken('judge', lambda x: 2 * x), 'judge', host=True, out_shapes=rows_of
  )
  learn = stages.Stage(
    broken('learn', lambda x: x.sum(0)),
    'learn',
    'sum',
    host=True,
    out_shapes=lambda x: jax.ShapeDtypeStruct(x.shape[1:], jnp.float32),
  )
  apply = stages.Stage(
    broken('apply', lambda w, g: w + g / 8),
    'apply',
    'batch',
    host=True,
    out_shapes=lambda w, g: rows_of(w),
  )

  def step(w, batch, key):
    del key
    g = learn(judge(generate(w, batch)))
    return apply(w, g), g

  return step


def runtime(step, plan):
  flow = flow_lib.trace(step, jnp.ones(2), BATCH, KEY)
  runtime = local.LocalRuntime(plan_lib.parse(plan, flow.stages), step=flow)
  in_memory.start(runtime, jnp.ones(2))
  return runtime


def apart(pieces=1, stages=None):
  """A plan of four places, one per stage unless `stages` says otherwise."""
  places = {f'at {name}': {'devices': [i]} for i, name in enumerate(NAMES)}
  stages = stages or {name: f'at {name}' for name in NAMES}
  return {'places': places, 'stages': stages, 'pieces': pieces}


@pytest.mark.parametrize('pieces', [1, 4])
def test_four_places_compute_what_one_does(pieces):
  want, planned = jnp.ones(2), runtime(workflow(), apart(pieces))
  for _ in range(5):
    info = planned.step(BATCH, KEY)
    want, want_info = workflow()(want, BATCH, KEY)
    np.testing.assert_array_equal(info, want_info)
    np.testing.assert_array_equal(in_memory.state(planned), want)
  planned.close()


@pytest.mark.parametrize('pieces', [1, 2])
@pytest.mark.parametrize('name', NAMES)
def test_a_stage_that_fails_anywhere_stops_every_place(name, pieces):
  planned = runtime(workflow(fail=name), apart(pieces))
  piece = ', piece 1 of 2' if pieces > 1 and name != 'apply' else ''
  message = f"Stage {name} on place 'at {name}' failed in step 1{piece}: it is"
  start = time.monotonic()
  with pytest.raises(base.StageError, match=message):
    planned.step(BATCH, KEY)
  with pytest.raises(base.StageError, match=message):
    planned.step(BATCH, KEY)  # The failure is sticky.
  assert time.monotonic() - start < 60
  planned.close()


def test_threads_end_when_a_runtime_is_closed():
  before = threading.active_count()
  planned = runtime(workflow(), apart(2))
  planned.step(BATCH, KEY)
  planned.close()
  for _ in range(1200):
    if threading.active_count() <= before:
      return
    time.sleep(0.05)
  raise AssertionError('Threads of a closed runtime are still alive.')


def test_pieces_are_learned_from_while_others_are_generated():
  begun, acted = threading.Event(), []

  def during(name):
    if name == 'learn':
      begun.set()
    if name == 'act':
      acted.append(name)
      # The last piece is generated for as long as none is learned from.
      assert len(acted) < 4 or begun.wait(60)

  planned = runtime(workflow(during=during), apart(4))
  planned.step(BATCH, KEY)
  spans = [s for s in planned.timeline.take() if s.what == 'run']
  act = [s for s in spans if s.stage == 'act']
  learn = [s for s in spans if s.stage == 'learn']
  assert [s.piece for s in act] == [(i, 4) for i in (1, 2, 3, 4)]
  assert learn[0].start < act[-1].end
  planned.close()


def test_what_a_place_waits_for_is_on_the_timeline():
  planned = runtime(workflow(act=1.0), apart())
  planned.step(BATCH, KEY)
  spans = planned.timeline.take()
  (wait,) = [s for s in spans if s.what == 'wait' and s.place == 'at judge']
  assert wait.stage.startswith('act') and wait.end - wait.start > 0.1
  sent = {
    (s.place, s.stage.partition('.')[0]) for s in spans if s.what == 'send'
  }
  assert sent == {
    ('at act', 'act'),
    ('at judge', 'judge'),
    ('at learn', 'learn'),
    ('at apply', 'apply'),
  }
  planned.close()


@pytest.mark.parametrize(
  'sketch', [{}, {'pieces': 2}, apart(), apart(2)], ids=str
)
def test_the_result_of_a_host_stage_is_never_overwritten(sketch):
  """Although the stage that reads it could reuse its memory."""
  results = []

  def keep(x):
    room = np.ones((len(x) + 1, WIDE), np.float32).ravel()
    # Aligned, so that JAX would alias it.
    begin = -room.ctypes.data % 64 // room.itemsize
    results.append(room[begin:][: len(x) * WIDE].reshape(len(x), WIDE))
    return results[-1]

  like = lambda x: jax.ShapeDtypeStruct((x.shape[0], WIDE), jnp.float32)
  act = stages.Stage(keep, 'act', host=True, out_shapes=like)
  judge = stages.stage('judge', consumes=(0,))(lambda x: 3 * x)
  learn = stages.stage('learn', 'batch')(lambda x: x.mean())
  apply = stages.stage('apply', 'batch')(lambda w, g: w + g)

  def step(w, batch, key):
    del key
    g = learn(judge(act(batch)))
    return apply(w, g), g

  planned = runtime(step, sketch)
  for _ in range(2):
    assert planned.step(BATCH, KEY) == 3
  planned.close()
  assert len(results) == 2 * sketch.get('pieces', 1)
  assert all((x == 1).all() for x in results)


def compiled(options):
  """A stage of two fused operations, as a place compiles it with options."""
  sine = stages.Stage(lambda x: 2 * jnp.sin(x), 'sine')
  flow = flow_lib.trace(
    lambda state, batch, key: (state, sine(batch)), jnp.ones(2), BATCH, KEY
  )
  place = place_lib.Place(
    'all', plan_lib.Placement(), {}, compiler_options={'sine': options}
  )
  return place.compile(flow, flow.nodes[0])


def test_a_place_compiles_with_the_options_of_its_plan():
  fusions = [
    'fusion' in compiled(options).as_text()
    for options in ({}, {'xla_disable_hlo_passes': 'fusion'})
  ]
  assert fusions == [True, False]


def test_an_option_that_xla_does_not_know_is_refused():
  message = 'sine is to be .*xla_go_faster.* name others for the stage'
  with pytest.raises(ValueError, match=message):
    compiled({'xla_go_faster': True})
