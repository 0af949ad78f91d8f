"""Devices that have parts of a group each: their meshes, work and plans."""

import dataclasses
import itertools
import math

import pytest

from planner import cluster
from planner.costs import roofline
from planner.costs.mesh import allowed_meshes, layout, per_device
from planner.counting import count
from planner.ir import groups
from planner.ir import plan as plan_lib
from planner.search import exact
from planner.search.plans import space as space_lib
from rlinf_jax.planning.compiled import hlo, matmul_flops
from rlinf_jax.runtime.places import place as place_lib
from sharding import rules
import stages
from stages import workflows
from stages.learn import optimizers
from tests.planner.search import reference
import tiny

GROUP = 8
DEVICE = cluster.Device('toy', {'float32': 1e9}, 1e9, 1e9, 1e11, 1e11)
LINK = cluster.Link(1e-7, 1e12)
TOYS = cluster.Cluster(DEVICE, 8, 8, LINK, LINK, memory_reserve=0.0)
ONE, TWO = (), (('data', 2),)
MIXED = (('data', 2), ('fsdp', 2), ('tensor', 2))


@pytest.fixture(scope='module')
def flow():
  """One group of eight rows, and a prompt of three times their tokens."""
  workflow = workflows.grpo(
    tiny.policy(), tiny.even, optimizers.adamw(1e-3), group_size=GROUP
  )
  return tiny.trace(workflow, tiny.problem(1, 20))


@pytest.fixture(scope='module')
def model(flow):
  return roofline.Roofline(flow, count.of_flow(flow), TOYS, rules.DEFAULT)


@pytest.mark.parametrize('is_divisible', [False, True])
@pytest.mark.parametrize('size', [1, 4, 6])
def test_calls_have_whole_groups_or_equal_parts_of_one(size, is_divisible):
  stage = stages.Stage(
    lambda x: x, 'stage', group_size=size, divisible_groups=is_divisible
  )
  for rows in range(-1, 4 * size):
    whole = rows > 0 and rows % size == 0
    part = any(rows * parts == size for parts in range(1, size + 1))
    assert groups.can_take(stage, rows) == (whole or (is_divisible and part))


def test_one_group_has_the_meshes_of_all_devices(flow, model):
  of_one = {axes for n in (2, 4, 8) for axes in model.axes(flow.stages, n)}
  assert {(('data', 8),), (('fsdp', 8),), MIXED} <= of_one
  assert all(math.prod(n for _, n in axes) in (2, 4, 8) for axes in of_one)
  # Sixteen devices cannot have a row each.
  assert (('data', 16),) not in model.axes(flow.stages, 16)


def test_stages_that_compare_rows_are_computed_by_every_device(flow, model):
  at = {node.name: node for node in flow.nodes}
  ways = {'gradient': 8, 'generate': 8, 'group_advantage': 1, 'measure': 1}
  for name, want in ways.items():
    where = model.layout, flow, at[name], (('data', 8),)
    assert allowed_meshes.row_ways(*where, rows=GROUP) == want, name
  spent = [
    model.explain(flow, at['group_advantage'], plan_lib.Placement(d, axes))
    for d, axes in (((0,), ()), (tuple(range(8)), (('data', 8),)))
  ]
  assert spent[0].total == spent[1].total


@pytest.mark.parametrize('rows', [1, 2, 4])
def test_each_part_of_a_group_reads_the_prompt(flow, model, rows):
  node = next(n for n in flow.nodes if n.name == 'gradient')
  there = count.work(node.stage.run, *count._arguments(flow, node, rows))
  found, whole = map(model.works['gradient'].at, (rows, GROUP))
  assert found.matmul_flops == pytest.approx(there.matmul_flops, rel=1e-9)
  assert found.matmul_flops > 1.2 * rows / GROUP * whole.matmul_flops


@pytest.mark.slow
@pytest.mark.parametrize(
  'axes, micro_batch', [(ONE, 2), (TWO, None), (MIXED, None), (TWO, 4)]
)
def test_flops_of_a_divided_gradient_are_those_of_the_compiled_program(
  flow, model, axes, micro_batch
):
  devices = tuple(range(math.prod(n for _, n in axes)))
  placement = plan_lib.Placement(devices, axes)
  rows = {'gradient': micro_batch} if micro_batch else {}
  chosen = plan_lib.Plan(
    {'all': placement}, dict.fromkeys(flow.stages, 'all'), micro_batch=rows
  )
  node = next(n for n in flow.nodes if n.name == 'gradient')
  compiled = place_lib.Place('all', placement, rows).compile(flow, node)
  want = matmul_flops.matmul_flops(hlo.parse(compiled.as_text()))
  found = per_device.stage_costs(flow, chosen, model, 'gradient', GROUP)
  assert found.matmul_flops == pytest.approx(want, rel=0.02)
  # As if devices shared one reading of the prompt.
  alone = model.works['gradient'].at(GROUP).matmul_flops
  assert found.matmul_flops > 1.2 * alone / max(1, len(devices))


def test_one_group_has_a_plan_of_all_devices(flow, model):
  space = dataclasses.replace(
    space_lib.default_space(flow, model), max_places=1, offload=()
  )
  found = exact.search(flow, model, space)
  assert found.gap == 0
  (place,) = found.best.places.values()
  assert place.devices == tuple(range(8))
  assert layout.Layout(rules.DEFAULT).row_ways(place.axes) > 1
  for node in flow.nodes:
    place_lib.Place('all', place, {}).check_node(flow, node)
  for axes in itertools.chain(*(model.axes(flow.stages, n) for n in (1, 4, 8))):
    devices = tuple(range(math.prod(n for _, n in axes)))
    chosen = plan_lib.one_place(flow.stages, plan_lib.Placement(devices, axes))
    seconds = reference.period(flow, model, chosen, 0)
    assert found.seconds <= seconds * (1 + 1e-9), axes
