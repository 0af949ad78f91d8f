"""Meshes that a planner offers, and bytes on them, against those of JAX."""

import itertools
import math

import jax
from jax.sharding import NamedSharding
import numpy as np
import pytest

from planner import cluster
from planner.costs import roofline
from planner.costs.mesh import (
  allowed_meshes,
  call_memory,
  collectives,
  layout,
)
from planner.counting import count
from planner.ir import graph
from planner.ir import plan as plan_lib
from rlinf_jax.runtime.places import place as place_lib
from sharding import mesh as mesh_lib
from sharding import rules
from stages import workflows
from stages.learn import optimizers
import tiny
import toys

DEVICE = cluster.Device(
  'toy', {'bfloat16': 1e12, 'float32': 5e11}, 1e11, 1e9, 1e11, 1e10
)
NEAR, FAR = cluster.Link(1e-6, 1e10), cluster.Link(1e-4, 1e9)
TOYS = cluster.Cluster(DEVICE, 64, 4, NEAR, FAR, memory_reserve=0.0)


@pytest.fixture(scope='module')
def workflow():
  return workflows.grpo(
    tiny.policy(), tiny.even, optimizers.adamw(1e-3), group_size=4
  )


@pytest.fixture(scope='module')
def flow(workflow):
  return tiny.trace(workflow, tiny.problem(8))


@pytest.fixture(scope='module')
def works(flow):
  return count.of_flow(flow)


@pytest.mark.slow
@pytest.mark.parametrize('devices', [1, 2, 4, 6, 8])
def test_the_meshes_offered_are_those_that_places_accept(flow, works, devices):
  m = roofline.Roofline(flow, works, TOYS, rules.DEFAULT)
  every = [
    axes
    for axes in layout.meshes(devices, ('data', 'fsdp', 'tensor'))
    if dict(axes).get('tensor', 1) <= 4
  ]

  def accepted(axes):
    placement = plan_lib.Placement(tuple(range(devices)), axes)
    place = place_lib.Place('all', placement, {})
    try:
      for v in flow.values:
        place.layout(v)
      for n in flow.nodes:
        place.check_node(flow, n)
    except ValueError:
      return False
    return True

  offered = m.axes(flow.stages, devices)
  assert sorted(offered) == sorted(filter(accepted, every))
  assert offered or devices == 6


def test_bytes_per_device_equal_jax_shard_sizes(flow):
  there = layout.Layout(rules.DEFAULT)
  for placement in tiny.PLACES.values():
    if not placement.axes:
      continue
    mesh = mesh_lib.mesh(jax.devices(), dict(placement.axes))
    for v in flow.values:
      spec = rules.partition_spec(mesh, v.letters, v.shape)
      shape = NamedSharding(mesh, spec).shard_shape(v.shape)
      want = math.prod(shape) * v.dtype.itemsize
      assert there.local(v, placement.axes) == want, v


def test_stages_without_dimension_letters_allow_data_parallelism_alone(
  flow, works
):
  m = roofline.Roofline(flow, works, TOYS, rules.DEFAULT)
  assert m.axes(('reward',), 4) == ((('data', 4),),)


def test_a_flow_is_read_once_for_all_meshes_of_all_places():
  """A thousand devices have tens of meshes, in each of many sizes of places."""

  class Values(tuple):
    reads = 0

    def __getitem__(self, i):
      Values.reads += 1
      return super().__getitem__(i)

  there = layout.Layout(rules.DEFAULT)
  array = graph.Value('x', (1024, 1024), np.dtype('float32'), ('E', 'F'))
  nodes = tuple(
    graph.Node(toys.Stage(name, 'batch'), (k,), (k + 1,), frozenset())
    for k, name in enumerate('ab')
  )
  flow = graph.Flow(nodes, Values((array,) * 3), (0,), (2,), ())
  meshes = allowed_meshes.Meshes([flow], there, 1024)
  for devices in (1024, 512, 24):
    for stages in (('a',), ('b',), ('a', 'b')):
      assert len(meshes.of(stages, devices)) > 3
  assert len(meshes.of(('a', 'b'), 1024)) > 20
  assert Values.reads == 4


@pytest.mark.parametrize(
  'devices, per_node', [(4, 4), (6, 8), (16, 4), (24, 8), (24, 12)]
)
def test_axes_without_rows_stay_within_a_node(devices, per_node):
  """By the nodes of each group of devices that differ in those axes alone."""
  there = layout.Layout(rules.DEFAULT)
  array = graph.Value('x', (24, 24), np.dtype('float32'), ('E', 'F'))
  flow = graph.Flow(
    (graph.Node(toys.Stage('a', 'batch'), (0,), (1,), frozenset()),),
    (array, array),
    (0,),
    (1,),
    (),
  )
  found = allowed_meshes.Meshes([flow], there, per_node).of(('a',), devices)

  def stays(axes):
    sizes = [n for _, n in axes]
    ids = np.arange(devices).reshape(sizes)
    of_rows = [i for i, (axis, _) in enumerate(axes) if axis in there.of_rows]
    rows = math.prod(sizes[i] for i in of_rows)
    groups = np.moveaxis(ids, of_rows, range(len(of_rows))).reshape(rows, -1)
    return all(len({*(group // per_node)}) == 1 for group in groups)

  fitting = [
    axes
    for axes in layout.meshes(devices, ('data', 'expert', 'tensor'))
    if all(24 % n == 0 for axis, n in axes if axis != 'data')
  ]
  assert sorted(found) == sorted(filter(stays, fitting))
  assert len(found) > 1


def test_device_groups_along_an_axis():
  axes = (('data', 2), ('tensor', 2))
  assert layout.along((4, 5, 6, 7), axes, 'data') == [(4, 6), (5, 7)]
  assert layout.along((4, 5, 6, 7), axes, 'tensor') == [(4, 5), (6, 7)]


@pytest.mark.parametrize('stage', ['gradient', 'generate'])
@pytest.mark.parametrize('place', ['one', 'data'])
def test_memory_of_a_stage_is_within_a_factor_of_two_of_xla(
  flow, works, place, stage
):
  """Within a factor of two: XLA fuses and reuses in ways of its own.

  With `fsdp` its partitioner does as it likes: it may share activations by
  width instead of gathering parameters, which the model does not know.
  """
  placement = tiny.PLACES[place]
  there = next(n for n in flow.nodes if n.name == stage)
  run = place_lib.Place('all', placement, {}).compile(flow, there)
  analysis = run.memory_analysis()
  own = call_memory.within(
    flow,
    there,
    placement.axes,
    plan_lib.Execution(),
    1,
    works,
    layout.Layout(rules.DEFAULT),
  )
  got = sum(number.value for number in own.values())
  assert 0.5 < got / analysis.temp_size_in_bytes < 2


def test_item_bytes():
  kinds = 'bfloat16', 'float32', 'float8_e4m3fn', 'int4', 'bool'
  assert [*map(collectives.item_bytes, kinds)] == [2, 4, 1, 0.5, 1]


@pytest.mark.parametrize('offload', [(), ('apply',)])
def test_a_stage_needs_memory_by_its_own_micro_batch_only(flow, offload):
  there = roofline.Roofline(flow, count.of_flow(flow), TOYS, rules.DEFAULT)
  placement = {'all': plan_lib.Placement((0, 1), (('data', 2),))}

  def needs(**micro_batch):
    chosen = plan_lib.Plan(
      placement,
      dict.fromkeys(flow.stages, 'all'),
      micro_batch=micro_batch,
      pieces=2,
      offload=offload,
    )
    return there.memory(flow, chosen, 'all')

  whole, cut = needs(), needs(gradient=8)
  assert cut.pop('gradient') < whole.pop('gradient')
  assert cut == whole
  assert {*flow.stages} <= {*whole, 'gradient'}


# Evaluations, whose batches have rows of their own.


@pytest.mark.parametrize('rows', [6, 8])
def test_meshes_divide_the_rows_of_evaluations_too(workflow, flow, works, rows):
  evaluation = tiny.trace_evaluation(workflow, tiny.problem(rows))
  costs = roofline.Roofline(
    flow, works, TOYS, rules.DEFAULT, evaluation=evaluation
  )
  shared = next(s for s in evaluation.stages if s in flow.stages)
  four = (('data', 4),)
  assert (four in costs.axes((shared,), 4)) == (rows == 8)
  assert (('data', 2),) in costs.axes((shared,), 2)
  # A stage that only steps have divides the rows of steps alone.
  assert four in costs.axes(('gradient',), 4)
  # Measurements change seconds, and not which meshes there are.
  measured = costs.with_measurements(costs.measured)
  assert measured.axes((shared,), 4) == costs.axes((shared,), 4)


def test_a_place_has_the_meshes_that_divide_all_of_its_stages():
  """By asking for all stages at once, of every mesh of the axes they read."""
  there = layout.Layout(rules.DEFAULT)
  letters = ('E', 'F'), ('B', ''), ('F', 'E')
  shapes = (8, 24), (6, 5), (12, 4)
  values = [
    graph.Value(str(shape), shape, np.dtype('float32'), some)
    for shape, some in zip(shapes, letters, strict=True)
  ]
  nodes = tuple(
    graph.Node(toys.Stage(name, 'batch'), (k,), (k,), frozenset())
    for k, name in enumerate('abc')
  )
  flow = graph.Flow(nodes, tuple(values), (0, 1, 2), (), ())
  meshes = allowed_meshes.Meshes([flow], there, 24)
  for number in (1, 2, 3):
    for some in itertools.combinations('abc', number):
      wanted = {
        axis
        for k, name in enumerate('abc')
        if name in some
        for letter in letters[k]
        if letter not in ('', 'B')
        for axis in there.axes_of(letter)
      }
      rows = [a for a in there.of_rows if a in wanted | {there.of_rows[0]}]
      names = (*rows, *sorted(wanted - {*there.of_rows}))
      for devices in (1, 4, 12, 24):
        assert list(meshes.of(some, devices)) == [
          axes
          for axes in layout.meshes(devices, names)
          if allowed_meshes.fits(flow, there, some, axes)
        ]
