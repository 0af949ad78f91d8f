"""Spaces of plans: written as JSON, refused where they hold no plan."""

import dataclasses
import json

import pytest

from planner import cluster as cluster_lib
from planner.costs import roofline
from planner.counting import count
from planner.ir import graph
from planner.ir import plan as plan_lib
from planner.search import algorithm1, exact
from planner.search.plans import space as space_lib
from sharding import rules
import stages
from stages import workflows
from stages.learn import optimizers
import tiny
import toys


def test_a_space_can_be_written_as_json():
  space = space_lib.Space(8, micro_batch={'a': (None, 4)}, offload=('a',))
  data = json.loads(space.to_json())
  assert data['devices'] == 8
  assert data['micro_batch'] == [['a', [None, 4]]]


@pytest.mark.parametrize(
  'kwargs, why',
  [
    ({'devices': 4, 'unit': 8}, 'no place of 8'),
    ({'devices': 4, 'max_places': 0}, '1 to 0 places'),
    ({'devices': 4, 'pieces': ()}, 'no plan'),
    ({'devices': 4, 'micro_batch': {'a': ()}}, r"no micro_batch .* \['a'\]"),
    ({'devices': 4, 'remat': (('a', ()),)}, r"no remat .* \['a'\]"),
  ],
)
def test_a_space_without_plans_is_refused(kwargs, why):
  with pytest.raises(ValueError, match=why):
    space_lib.Space(**kwargs)


def test_unknown_stages_are_refused():
  flow, model = toys.line({'a': 1.0, 'b': 1.0})
  for strange in ({'colocated': (('a', 'z'),)}, {'offload': ('z',)}):
    with pytest.raises(ValueError, match=r"\['z'\].*'a', 'b'"):
      exact.search(flow, model, space_lib.Space(2, **strange))


@pytest.mark.parametrize('search', [exact.search, algorithm1.algorithm1])
def test_a_flow_without_stages_is_refused(search):
  empty = graph.Flow((), (toys.value(),), (0,), (0,), ())
  with pytest.raises(ValueError, match='has no stages'):
    search(empty, toys.Synthetic({}), space_lib.Space(3))


def cluster(devices=1, memory=1e9):
  device = cluster_lib.Device('toy', {'float32': 1e10}, 1e9, memory, 1e9, 1e9)
  link = cluster_lib.Link(1e-6, 1e9)
  return cluster_lib.Cluster(device, devices, devices, link, link, 0.0)


@pytest.mark.parametrize('devices', [1, 8, 1024])
@pytest.mark.parametrize('group', [1, 8])
@pytest.mark.parametrize('rows', [80, 96, 512, 768, 4096])
def test_parts_of_rows_are_whole_groups_down_to_one_a_device(
  rows, group, devices
):
  stage = stages.Stage(lambda x: x, 'stage', group_size=group)
  parts = space_lib.micro_batch_sizes(rows, stage, cluster(devices))
  halves = {rows // 2**i for i in range(1, 9) if not rows % (2**i * group)}
  ways = {2**i for i in range(11) if 2**i <= devices}
  one_a_device = {
    group * n for n in ways if not rows % (group * n) and group * n < rows
  }
  assert parts == sorted(halves | one_a_device, reverse=True)


def test_parts_of_groups_go_down_to_a_row_a_device():
  stage = stages.Stage(
    lambda x: x, 'stage', group_size=8, divisible_groups=True
  )
  assert space_lib.micro_batch_sizes(24, stage, cluster(4)) == [8, 4, 2, 1]
  assert space_lib.micro_batch_sizes(512, stage, cluster(1024)) == [
    2**i for i in reversed(range(9))
  ]


def test_what_fits_in_one_group_at_a_time_alone_has_a_plan():
  """Twelve rows in groups of four have no half of whole groups."""
  workflow = workflows.grpo(
    tiny.policy(), tiny.even, optimizers.adamw(1e-2), group_size=4
  )
  flow = tiny.trace(workflow, tiny.problem(3))
  works = count.of_flow(flow)

  def model(memory):
    return roofline.Roofline(flow, works, cluster(memory=memory), rules.DEFAULT)

  def need(micro_batch):
    plan = dataclasses.replace(
      plan_lib.one_place(flow.stages), micro_batch=micro_batch
    )
    return max(model(1e9).memory(flow, plan, 'all').values())

  most, least = need({}), need({'gradient': 4})
  assert least < most
  costs = model((most + least) / 2)
  space = dataclasses.replace(space_lib.default_space(flow, costs), offload=())
  found = exact.search(flow, costs, space)
  assert found.best.micro_batch == {'gradient': 4}
