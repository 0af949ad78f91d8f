import dataclasses
import functools
import inspect
import itertools
import os
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from planner import cluster as cluster_lib
from planner.costs import roofline
from planner.counting import count
from planner.ir import flow as flow_lib
from rlinf_jax.planning.profiling import (
  call_timing,
  flow_profile,
  machine_profile,
  profile_store,
  stage_profile,
)
from rlinf_jax.state import state_readers
from sharding import rules
import stages
from stages import workflows
from stages.learn import optimizers
import tiny


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
  monkeypatch.setattr(machine_profile, 'busy_devices', lambda: 1)


@pytest.mark.parametrize(
  'rows, group_size, most, want',
  [
    (8, 4, 8, (4, 8)),
    (8, 8, 8, (8,)),
    (6, 1, 6, (1, 2, 6)),
    (36, 2, 36, (2, 6, 36)),
    (36, 2, 12, (2, 4, 12)),
    (7, 1, 3, (1,)),
    (8, 4, 2, (4,)),
  ],
)
def test_sizes_span_what_fits_in_whole_shares_of_groups(
  rows, group_size, most, want
):
  assert stage_profile.sizes(rows, group_size, most) == want


def test_what_is_stored_is_found_on_the_same_machine_alone(
  tmp_path, monkeypatch
):
  what = {'what': 'stage', 'stage': 'act', 'program': 'long'}
  one = profile_store.Store(tmp_path)
  assert one.get(what) is None
  one.put(what, [[4, 0.5]])
  assert profile_store.Store(tmp_path).get(what) == [[4, 0.5]]
  assert one.get({**what, 'program': 'other'}) is None
  here = profile_store.machine()
  for key in here:
    changed = {**here, key: 'another'}
    monkeypatch.setattr(
      profile_store, 'machine', lambda changed=changed: changed
    )
    assert profile_store.Store(tmp_path).get(what) is None, key


def test_what_cannot_be_read_or_written_is_measured_again(tmp_path):
  what = {'what': 'stage'}
  one = profile_store.Store(tmp_path / 'a')
  one.put(what, 1.0)
  (file,) = (tmp_path / 'a').iterdir()
  for damaged in '{"measured": ', '{}', '[]':
    file.write_text(damaged)
    assert one.get(what) is None
  (tmp_path / 'b').write_text('a file, not a folder')
  closed = profile_store.Store(tmp_path / 'b')
  closed.put(what, 1.0)
  assert closed.get(what) is None


def test_the_cache_is_where_it_is_said_to_be(tmp_path, monkeypatch):
  monkeypatch.setenv('RLINF_JAX_CACHE', str(tmp_path / 'mine'))
  assert profile_store.folder() == tmp_path / 'mine'
  monkeypatch.delenv('RLINF_JAX_CACHE')
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
  assert profile_store.folder() == tmp_path / 'rlinf_jax'


def test_a_machine_is_measured_once(tmp_path, monkeypatch):
  measured = machine_profile.measure_cluster(profile_store.Store(tmp_path))
  assert measured.num_devices == measured.devices_per_node == len(jax.devices())
  assert measured.device.matmul_flops['float32'] > 1e8
  assert measured.intra_node.latency_seconds > 0
  assert measured.device.host_latency_seconds > 0
  assert measured.host_seconds(1e9) > 1e-3  # No memory is so fast.
  monkeypatch.setattr(machine_profile, '_measure', lambda: 1 / 0)
  again = machine_profile.measure_cluster(profile_store.Store(tmp_path))
  assert again == measured


def test_another_version_measures_a_machine_again(tmp_path, monkeypatch):
  rates = 'vector_flops', 'memory_bandwidth', 'host_bandwidth'
  known = {
    'device': dict.fromkeys(rates, 1.0) | {'matmul_flops': {'float32': 1.0}},
    'link': {'latency_seconds': 1.0, 'bandwidth': 1.0},
    'contention': 1.0,
  }
  measured = []
  monkeypatch.setattr(
    machine_profile, '_measure', lambda: measured.append(1) or known
  )
  store = profile_store.Store(tmp_path)
  for version in 'old', 'old', 'new':
    monkeypatch.setattr(inspect, 'getsource', lambda _, text=version: text)
    machine_profile.measure_cluster(store)
  assert len(measured) == 2


def test_devices_of_a_processor_have_shares_of_it(monkeypatch):
  monkeypatch.undo()
  cores = len(os.sched_getaffinity(0))
  assert machine_profile.cores() == cores
  assert machine_profile.busy_devices() == min(len(jax.devices()), cores)


class Clock(threading.local):
  """A clock of each thread, which goes on by `spend` alone."""

  now = 0.0

  def spend(self, seconds):
    self.now += seconds


@pytest.fixture
def clock(monkeypatch):
  """A clock that other work on the machine does not move."""
  found = Clock()
  by_it = functools.partial(call_timing.seconds, clock=lambda: found.now)
  monkeypatch.setattr(call_timing, 'seconds', by_it)
  return found


def test_a_clock_tells_the_median_of_calls_at_once(clock):
  def spent(seconds):
    return lambda: clock.spend(seconds)

  one, two, both = call_timing.seconds(
    [[spent(0.06)], [spent(0.12)], [spent(0.06), spent(0.12)]]
  )
  assert (one, two) == (pytest.approx(0.06), pytest.approx(0.12))
  assert both == pytest.approx(0.09)  # At once: the mean of the two.


def test_a_call_that_is_delayed_once_does_not_count(clock):
  delays = [0.0, 5.0]
  (found,) = call_timing.seconds(
    [[lambda: clock.spend(0.01 + (delays.pop() if delays else 0.0))]]
  )
  assert found == pytest.approx(0.01)


def toy_cluster(memory=4e9):
  device = cluster_lib.Device('toy', {'float32': 1e10}, 1e9, memory, 1e10, 5e9)
  link = cluster_lib.Link(1e-5, 1e10)
  return cluster_lib.Cluster(device, 1, 1, link, link)


def grpo():
  workflow = workflows.grpo(
    tiny.policy(),
    tiny.even_on_host,
    optimizers.adamw(1e-2),
    group_size=2,
    kl_coef=0.1,
  )
  state = workflow.init(jax.random.key(0))
  return workflow, (state, tiny.problem(), jax.random.key(1))


def setting(step, args, memory=4e9):
  flow = flow_lib.trace(step, *args)
  model = roofline.Roofline(
    flow, count.of_flow(flow), toy_cluster(memory), rules.DEFAULT
  )
  first = state_readers.FirstState(lambda: args[0])
  start = flow_profile.StartValues(flow, first, jax.tree.leaves(args[1:]))
  return flow, start.read, model


@pytest.mark.slow
def test_stages_are_measured_once_and_then_remembered(tmp_path, monkeypatch):
  workflow, args = grpo()
  flow, read, model = setting(workflow.step, args)
  keep = profile_store.Store(tmp_path)
  lines = []
  found = stage_profile.measure(
    flow, read, model, keep, print_line=lines.append
  )
  assert lines[0] == f'  generate (1 of {len(lines)})'
  assert {name for name, *_ in found.curves} <= {x.split()[0] for x in lines}
  assert found.curves['gradient', 1, ()].points[-1][0] == 16
  assert found.rows('generate') == [2, 4, 16]
  assert ('apply', 1, ()) in found.constants
  assert all(s > 0 for c in found.curves.values() for _, s in c.points)
  monkeypatch.setattr(stage_profile, 'Bench', lambda *args: 1 / 0)
  # Stages of equal programs share their measurement.
  workflow, args = grpo()
  flow, read, model = setting(workflow.step, args)
  # The same stages are worth measuring, as modeled.
  assert (
    stage_profile.measure(flow, read, model, profile_store.Store(tmp_path))
    == found
  )


ROW = 0.01


def _double(x_BD):
  return 2 * x_BD


slow = stages.Stage(_double, 'slow', host=True, out_shapes=lambda x: x)
total = stages.Stage(
  lambda x_BD: jnp.tanh(x_BD @ x_BD.T @ x_BD).sum(0),
  'total',
  'sum',
  group_size=2,
)


@stages.stage('keep', 'batch')
def keep(state, x_D):
  return {'x': state['x'] + x_D}


def slow_setting(fn=_double):
  stage = dataclasses.replace(slow, fn=fn)

  def step(state, x_BD, key):
    del key
    return keep(state, total(stage(x_BD))), ()

  args = {'x': jnp.zeros(3)}, np.ones((16, 3), np.float32), jax.random.key(0)
  return setting(step, args)


def _judge(scale):
  def judge(x):
    return scale * x

  return stages.Stage(judge, 'judge', host=True, out_shapes=lambda x: x)


@pytest.mark.parametrize(
  'other', [lambda x: 2 * x, functools.partial(_double), np.negative]
)
def test_a_host_stage_is_known_by_its_text_and_what_it_is_bound_to(other):
  def identity(fn):
    return list(stage_profile._python(fn))

  assert identity(_judge(2).fn) == identity(_judge(2).fn)
  assert identity(_judge(2).fn) != identity(_judge(3).fn)
  assert identity(other) != identity(_judge(2).fn)
  assert any('def test_a_host_stage' in some for some in identity(_judge(2).fn))


def test_a_stage_takes_as_long_as_its_rows_say(tmp_path, clock):
  def spend(x_BD):
    clock.spend(ROW * len(x_BD))
    return x_BD

  flow, read, model = slow_setting(spend)
  found = stage_profile.measure(
    flow, read, model, profile_store.Store(tmp_path)
  )
  points = found.curves['slow', 1, ()].points
  assert len(points) == stage_profile.SIZES and points[-1][0] == 16
  for rows, seconds in points:
    assert seconds == pytest.approx(ROW * rows)


def test_calls_at_once_tell_how_devices_slow_each_other_down(
  tmp_path, monkeypatch, clock
):
  monkeypatch.setattr(machine_profile, 'busy_devices', lambda: 2)
  in_turn = itertools.cycle([1, 2])

  def spend(x_BD):
    clock.spend(ROW * len(x_BD))
    return x_BD

  def wait_and_spend(x_BD):
    """Takes twice as long in the second of two calls at once."""
    is_alone = threading.current_thread() is threading.main_thread()
    for _ in range(1 if is_alone else next(in_turn)):
      spend(x_BD)
    return x_BD

  alone = stages.Stage(spend, 'alone', host=True, out_shapes=lambda x: x)
  in_line = stages.Stage(
    wait_and_spend, 'in_line', host=True, out_shapes=lambda x: x
  )

  def both(state, x_BD, key):
    del key
    return keep(state, total(in_line(alone(x_BD)))), ()

  args = {'x': jnp.zeros(3)}, np.ones((16, 3), np.float32), jax.random.key(0)
  found = stage_profile.measure(
    *setting(both, args), profile_store.Store(tmp_path)
  )
  assert found.contention['alone'] == pytest.approx(1.0)
  assert found.contention['in_line'] == pytest.approx(1.5)


class Simulator:
  """Counts the steps of each environment, and goes forward only.

  Attributes:
    calls: steps of each environment.
  """

  def __init__(self, clock):
    self.calls, self._clock = np.zeros(16, int), clock

  def step(self, token_B2, action_B):
    row_B, call_B = np.asarray(token_B2).T
    assert (self.calls[row_B] == call_B).all()
    self._clock.spend(ROW * len(row_B))
    self.calls[row_B] += 1
    return np.stack([row_B, call_B + 1], 1), action_B + 1


def test_a_simulator_is_measured_by_going_on(tmp_path, clock):
  simulator = Simulator(clock)
  simulate = stages.Stage(
    simulator.step,
    'simulate',
    host=True,
    consumes=(0,),
    out_shapes=lambda *args: args,
  )

  def acted(state, x_B, key):
    del key
    token, obs = simulate(state['token'], x_B)
    token, obs = simulate(token, obs)
    return {'token': token}, ()

  token = np.stack([np.arange(16), 0 * np.arange(16)], 1).astype(np.int32)
  args = {'token': token}, np.ones(16, np.float32), jax.random.key(0)
  flow, read, model = setting(acted, args)
  assert stage_profile.uses_up(flow.nodes[0])
  found = stage_profile.measure(
    flow, read, model, profile_store.Store(tmp_path)
  )
  points = found.curves['simulate', 1, ()].points
  assert [rows for rows, _ in points] == [1, 4, 16]
  for rows, seconds in points:
    assert seconds == pytest.approx(ROW * rows)
  assert simulator.calls.min() > 3  # All have gone on, each in its order.


def test_what_cannot_go_on_is_not_measured():
  flow, _, _ = slow_setting()
  (node,) = (node for node in flow.nodes if node.name == 'slow')
  assert not stage_profile.uses_up(node) and not stage_profile.successors(
    flow, node
  )


def test_rows_that_do_not_fit_are_not_tried(tmp_path):
  flow, read, model = slow_setting()
  alive = model.works['total'].at(16).bytes_alive
  model.capacity = alive / stage_profile.FILL / 2
  (node,) = (node for node in flow.nodes if node.name == 'total')
  assert stage_profile._most(flow, node, model) < 16


def test_a_flow_resized_has_other_rows_there_alone():
  flow, _, _ = slow_setting()
  slow_node, total_node, _ = flow.nodes
  fewer = stage_profile.resized(flow, slow_node, 4)
  assert fewer.values[slow_node.writes[0]].shape == (4, 3)
  assert fewer.values[slow_node.reads[0]].shape == (4, 3)
  fewer = stage_profile.resized(flow, total_node, 4)
  assert fewer.values[total_node.writes[0]].shape == (3,)
  assert fewer.values[slow_node.reads[0]].shape == (16, 3)
