"""The driver holds no parameter: places make, write and read the state."""

import os
import signal

import jax
import numpy as np
import pytest
import ray

from experiments.processes import driver_memory, two_places
from planner.ir import plan as plan_lib
from rlinf_jax.run.folder import checkpoint
from rlinf_jax.runtime import local, programs, state_readers
from rlinf_jax.runtime.base import ProcessDiedError
from rlinf_jax.runtime.ray import connection, driver
import saved
import tiny

pytestmark = pytest.mark.slow

SIZE = 48 * 2**20  # Bytes of the state.
LEAF = SIZE // two_places.BYTES // two_places.LEAVES
X = np.ones(4, np.float32)
SOURCE = {'at': np.zeros(1)}


@pytest.fixture(scope='module', autouse=True)
def ray_cluster():
  connection.connect()
  yield
  ray.shutdown()


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
  tiny.assert_same_bits(saved.state_of(remote), local_.state())


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


def shapes_of(runtime):
  return programs.state_shapes(runtime.lowered['step'].flow)


def test_the_driver_of_a_state_takes_a_small_share_of_its_memory():
  found = driver_memory.measure(200 * 2**20)
  assert found['driver_mib'] < 20
  assert found['learner_mib'] > 200  # The measurement sees a state.
