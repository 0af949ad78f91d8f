"""A toy flow, cluster and cost model whose numbers one computes by hand."""

import dataclasses
import math

import numpy as np

from planner import cluster
from planner.costs import roofline
from planner.costs.work import StageWork, Work
from planner.ir import graph
from planner.ir import plan as plan_lib
from sharding import rules

SURE = roofline.Assumptions(
  matmul_efficiency=1.0, vector_efficiency=1.0, memory_efficiency=1.0
)
DEVICE = cluster.Device(
  'toy', {'bfloat16': 1e12, 'float32': 5e11}, 1e11, 1e9, 1e11, 1e10
)
NEAR, FAR = cluster.Link(1e-6, 1e10), cluster.Link(1e-4, 1e9)
TOYS = cluster.Cluster(DEVICE, 64, 4, NEAR, FAR, memory_reserve=0.0)


@dataclasses.dataclass(frozen=True)
class Stage:
  name: str
  grain: str = 'row'
  group_size: int = 1
  divisible_groups: bool = False
  host: bool = False
  unbatched = (0,)
  engine = None


F32, LAYERS, D, F = np.dtype('float32'), 10, 64, 256
PARAMS = 4 * LAYERS * D * F


def value(name, shape, letters):
  return graph.Value(name, shape, F32, letters)


def toy_flow() -> graph.Flow:
  """act: params, rows -> rows; grad: params, rows -> sums; step: sums."""
  lettered = (LAYERS, D, F), ('', 'D', 'F')
  values = (
    value('state.params.up_DF', *lettered),
    value('state.moments.up_DF', *lettered),
    value('input', (32, 8), ('B', '')),
    value('act', (32, 8), ('B', '')),
    value('grad.up_DF', *lettered),
    value('step.params.up_DF', *lettered),
    value('step.moments.up_DF', *lettered),
    value('judge', (32,), ('B',)),
  )
  nodes = (
    graph.Node(Stage('act'), (0, 2), (3,), frozenset({2})),
    graph.Node(Stage('judge', host=True), (3,), (7,), frozenset({3})),
    graph.Node(
      Stage('grad', 'sum', group_size=2), (0, 3), (4,), frozenset({3})
    ),
    graph.Node(Stage('step', 'batch'), (0, 1, 4), (5, 6)),
  )
  carry = ((0, 5), (1, 6))
  return graph.Flow(nodes, values, (2,), (7,), carry)


WORKS = {
  'act': StageWork(
    Work(flops=0, bytes_moved=PARAMS, kernels=10),
    Work(flops=1e9, matmul={'bfloat16': 1e9}, bytes_moved=1e3),
    32,
  ),
  'judge': None,
  'grad': StageWork(
    Work(
      bytes_moved=2 * PARAMS,
      bytes_alive=2e4,
      partial={'F': (LAYERS, 0.0, 0.0), 'D': (32.0, 0.0, 0.0)},
    ),
    Work(
      flops=4e9,
      matmul={'bfloat16': 3e9},
      bytes_alive=1e4,
      partial={'F': (0.0, 1e6, 0.0), 'D': (0.0, 1e9, 0.0)},
    ),
    32,
  ),
  'step': StageWork(
    Work(flops=1e6, bytes_moved=5 * PARAMS), elementwise=((1,),)
  ),
}


def model(there=TOYS, assumed=SURE, **kwargs) -> roofline.Roofline:
  return roofline.Roofline(
    toy_flow(), WORKS, there, rules.DEFAULT, assumed=assumed, **kwargs
  )


def node(name, flow=None):
  return next(n for n in (flow or toy_flow()).nodes if n.name == name)


def spot(*axes, first=0) -> plan_lib.Placement:
  n = math.prod(size for _, size in axes)
  return plan_lib.Placement(tuple(range(first, first + n)), axes)


def explained(name, *axes, rows=None, **kwargs):
  return model(**kwargs).explain(toy_flow(), node(name), spot(*axes), rows)
