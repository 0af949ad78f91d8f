"""The driver holds no parameter: places make, write and read the state."""

import errno
import functools
import os
import signal
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ray
from ray import util

from experiments.processes import driver_memory, two_places
import in_memory
import local_ray
from planner.ir import flow as flow_lib
from planner.ir import plan as plan_lib
from rlinf_jax.planning import autoplan
from rlinf_jax.planning.profiling import profiler
from rlinf_jax.run_files import checkpoint
from rlinf_jax.runtime import executor, local, programs
from rlinf_jax.runtime.base import ProcessDiedError, StageError
from rlinf_jax.runtime.ray import driver
from rlinf_jax.state import state_readers
import saved
import stages
from stages import base
import tiny

pytestmark = pytest.mark.slow
cluster = local_ray.cluster

SIZE = 48 * 2**20  # Bytes of the state.
LEAF = SIZE // two_places.BYTES // two_places.LEAVES
X = np.ones(4, np.float32)
SOURCE = {'at': np.zeros(1)}


@pytest.fixture
def runtimes():
  """Makes a RayRuntime and a LocalRuntime of one plan."""
  there = []

  def make(size=SIZE):
    initial = two_places.Initial(size // (SIZE // LEAF))
    flows = two_places.Flows(initial)
    step, _ = flows()
    plan = plan_lib.parse(two_places.PLAN, dict.fromkeys(step.stages))
    there.append(driver.RayRuntime(plan, flows, step=step))
    there.append(local.LocalRuntime(plan, step=step))
    return *there, state_readers.FirstState(initial)

  yield make
  for runtime in there:
    runtime.close()


@pytest.fixture
def messages(monkeypatch):
  """Bytes of every message from and to this process."""
  sizes = []

  def recorded(function, of_result):
    def call(*args, **kwargs):
      result = function(*args, **kwargs)
      sent = result if of_result else (args[-2:], kwargs)
      sizes.append(len(ray.cloudpickle.dumps(sent)))
      return result

    return call

  monkeypatch.setattr(ray, 'get', recorded(ray.get, True))
  monkeypatch.setattr(ray, 'put', recorded(ray.put, False))
  method = ray.actor.ActorMethod
  remote = method._remote

  def call(self, args=(), kwargs=None, **options):
    sizes.append(len(ray.cloudpickle.dumps((args, kwargs))))
    return remote(self, args, kwargs, **options)

  monkeypatch.setattr(method, '_remote', call)
  return sizes


def checkpoint_of(runtime, folder, first):
  """Writes a checkpoint of a runtime's state; returns its reader."""
  files = checkpoint.Checkpoints(folder, 2)
  files.save(1, runtime, SOURCE, {})
  files.wait()
  return files, files.load(shapes_of(runtime), first, SOURCE).state


def test_no_message_and_no_array_of_the_driver_holds_a_parameter(
  runtimes, messages, tmp_path
):
  remote, local_, first = runtimes()
  live = sum(x.nbytes for x in jax.live_arrays())
  remote.start(first)
  info = remote.step(X, two_places.KEY)
  _, reader = checkpoint_of(remote, tmp_path / 'run', first)
  remote.start(reader, 1)
  again = remote.step(X, two_places.KEY)
  assert messages and max(messages) < LEAF * 4 / 10
  assert sum(x.nbytes for x in jax.live_arrays()) - live < LEAF * 4
  # One process computes the same as the places, which wrote and read.
  local_.start(first)
  assert local_.step(X, two_places.KEY) == info
  assert local_.step(X, two_places.KEY) == again
  tiny.assert_same_bits(saved.state_of(remote), in_memory.state(local_))


def test_messages_are_seen(messages):
  ray.get(ray.put(np.zeros(1000)))
  assert [size > 8000 for size in messages] == [True, True]


class Dying:
  """Writes the state of a runtime, one of whose processes dies meanwhile."""

  def __init__(self, runtime, victim):
    self.runtime, self.checksums = runtime, runtime.checksums
    self.pid = runtime.processes()[victim]['pid']

  def start_writing(self, folder):
    finish = self.runtime.start_writing(folder)
    os.kill(self.pid, signal.SIGKILL)
    return finish


def test_a_place_that_dies_while_it_writes_leaves_the_last_checkpoint(
  runtimes, tmp_path
):
  remote, local_, first = runtimes()
  remote.start(first)
  remote.step(X, two_places.KEY)
  files, reader = checkpoint_of(remote, tmp_path, first)
  info = remote.step(X, two_places.KEY)
  files.save(2, Dying(remote, 'learner'), SOURCE, {})
  with pytest.raises(ProcessDiedError, match="place 'learner' has died"):
    files.wait()
  assert files.latest() == 1
  remote.start(reader, 1)  # As a run does that goes on from it.
  assert remote.step(X, two_places.KEY) == info
  # A place that holds copies alone is missed by no checkpoint.
  files.save(2, Dying(remote, 'actor'), SOURCE, {})
  files.close()
  files = checkpoint.Checkpoints(tmp_path, 2, read_only=True)
  assert files.steps() == [1, 2]
  # It is replaced in the next step.
  local_.start(files.load(shapes_of(local_), first, SOURCE).state, 2)
  want = local_.step(X, two_places.KEY)
  assert remote.step(X, two_places.KEY) == want


def test_no_array_of_the_driver_holds_a_parameter_while_stages_are_measured(
  messages, tmp_path, monkeypatch
):
  monkeypatch.setenv('RLINF_JAX_CACHE', str(tmp_path))
  initial = two_places.Initial(LEAF)
  flows = two_places.Flows(initial)
  step, _ = flows()
  made, put = [], state_readers.deferred.put

  def seen(x, *args, **kwargs):
    made.append(x.shape)
    return put(x, *args, **kwargs)

  monkeypatch.setattr(state_readers.deferred, 'put', seen)
  live = sum(x.nbytes for x in jax.live_arrays())
  largest = []

  def measure():
    first = state_readers.FirstState(initial)
    profile = profiler.measure(flows, first, [X, two_places.KEY])
    largest.append(sum(x.nbytes for x in jax.live_arrays()) - live)
    return profile

  chosen = autoplan.find_plan((step, step), 0, measure)
  assert ('learn', 1, ()) in chosen.model.measured.constants
  assert chosen.prediction.stages['learn'].tag == 'measured'
  assert messages and max(messages) < LEAF * 4 / 10
  assert largest[0] < LEAF * 4 and not made
  assert list(tmp_path.iterdir())  # For the next run.
  names = [x['name'] for x in util.list_named_actors(all_namespaces=True)]
  assert not [name for name in names if name.startswith(profiler.NAME)]


def test_what_fails_while_it_is_measured_is_said(tmp_path, monkeypatch):
  monkeypatch.setenv('RLINF_JAX_CACHE', str(tmp_path))
  flows = two_places.Flows(two_places.Initial(4))
  inputs = [X, two_places.KEY]
  other = state_readers.FirstState(three)
  with pytest.raises(ValueError, match='make it with the same workflow'):
    profiler.measure(flows, other, inputs)
  dying = state_readers.FirstState(functools.partial(os._exit, 1))
  with pytest.raises(ProcessDiedError, match="place 'profiler' has died"):
    profiler.measure(flows, dying, inputs)


def shapes_of(runtime):
  return programs.state_shapes(runtime.lowered['step'].flow)


def test_the_driver_of_a_state_takes_a_small_share_of_its_memory():
  found = driver_memory.measure(200 * 2**20)
  assert found['driver_mib'] < 20
  assert found['learner_mib'] > 200  # The measurement sees a state.
  found = driver_memory.measure_planning(200 * 2**20)
  assert found['driver_mib'] < 40
  # Stages were measured: no processor adds 150 MiB in so little.
  assert found['learn_seconds'] > 0.01


@stages.stage('judge', 'row', unbatched=(0,))
def judge(teacher, x):
  return x * teacher.sum()


@stages.stage('left', 'batch')
def left(w, x):
  return w + x.sum(), x.sum()


@stages.stage('right', 'batch')
def right(w, x):
  return w - x.sum()


THREE = {
  'places': {name: {'devices': [i]} for i, name in enumerate('abc')},
  'stages': {'left': 'a', 'right': 'b', 'judge': 'c'},
}


def three():
  """A state of which 'a', 'b' and, of what is frozen, 'c' own some."""
  zero = jnp.zeros(())
  return {'left': zero, 'right': zero, base.FROZEN: {'teacher': jnp.ones(3)}}


def three_flows(writing=None):
  """Records a step, and has places take `writing` for what starts it."""
  is_driver = ray.get_runtime_context().get_actor_id() is None
  if writing and not is_driver:
    executor.Executor.start_writing = writing

  def step(state, x, key):
    del key
    x = judge(state[base.FROZEN]['teacher'], x)
    w, total = left(state['left'], x)
    return state | {'left': w, 'right': right(state['right'], x)}, total

  return flow_lib.trace(step, jax.eval_shape(three), X, two_places.KEY), None


@pytest.fixture
def in_three():
  """Makes a runtime of three places that has taken a step."""
  there = []

  def make(writing=None):
    flows = functools.partial(three_flows, writing)
    step, _ = flows()
    plan = plan_lib.parse(THREE, dict.fromkeys(step.stages))
    there.append(driver.RayRuntime(plan, flows, step=step))
    there[-1].start(state_readers.FirstState(three))
    assert there[-1].step(X, two_places.KEY) == 12
    return there[-1]

  yield make
  for runtime in there:
    runtime.close()


write = executor.Executor.start_writing


def dying_or_slow(self, folder):
  """Place 'a' dies as it starts to write, and 'b' takes long to start."""
  if 'a' in self.places:
    os._exit(1)
  time.sleep(2)
  return write(self, folder)


def test_no_place_starts_to_write_after_the_death_of_another_is_reported(
  in_three, tmp_path
):
  remote = in_three(dying_or_slow)
  with pytest.raises(ProcessDiedError, match="process of place 'a' has died"):
    remote.start_writing(tmp_path)
  reported = sorted(tmp_path.rglob('*'))
  b = remote._pool.actors['b']
  ray.get(b.checksums.remote())  # It answers when it has started to write.
  ray.get(b.finish_writing.remote())
  assert sorted(tmp_path.rglob('*')) == reported


def test_a_checkpoint_waits_for_the_replacement_of_who_holds_frozen_weights(
  in_three, tmp_path, monkeypatch
):
  remote = in_three()
  pid = remote.processes()['c']['pid']
  recover, times = remote._recover, []

  def then_dies():
    recover()
    times.append(1)
    if len(times) == 1:
      os.kill(pid, signal.SIGKILL)

  monkeypatch.setattr(remote, '_recover', then_dies)
  assert remote.checksums() == saved.Tree(three()).checksums()
  assert "place 'c' has died" in ''.join(remote.notices())
  _, reader = checkpoint_of(remote, tmp_path, state_readers.FirstState(three))
  state = saved.whole(reader, jax.eval_shape(three))
  assert (state['left'], state['right']) == (12, -12)


@ray.remote(num_cpus=0, concurrency_groups={'files': 1})
class Writer:
  """Stands for an `Actor` that takes some seconds to write its part."""

  def __init__(self, seconds, error=None):
    self.seconds, self.error = seconds, error

  def describe(self):
    return {}

  @ray.method(concurrency_group='files')
  def finish_writing(self):
    time.sleep(self.seconds)
    if self.error:
      raise self.error


def test_a_full_disk_is_reported_as_such_and_ends_its_place_alone():
  step, _ = three_flows()
  two = {'axes': [['data', 2]], 'processes': 2}
  places = {
    name: {'devices': [2 * i, 2 * i + 1]} | two for i, name in enumerate('abc')
  }
  plan = plan_lib.parse(THREE | {'places': places}, dict.fromkeys(step.stages))
  remote = driver.RayRuntime(plan, three_flows, step=step)
  full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
  remote._pool.actors = {
    'a 1/2': Writer.remote(1, full),
    'a 2/2': Writer.remote(600),  # In a barrier, which the other never enters.
    'b 1/2': Writer.remote(3),
    'b 2/2': Writer.remote(3),
  }
  with pytest.raises(StageError, match="'a 1/2' failed.*No space left") as info:
    remote._finish_writing(remote._pool.actors)
  assert not isinstance(info.value, ProcessDiedError)
  assert {*remote._pool.dead()} == {'a 1/2', 'a 2/2'}
  remote.close()
