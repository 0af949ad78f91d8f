"""Bytes that devices send where rows only move, against XLA's programs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from planner import cluster as cluster_lib
from planner.costs import roofline
from planner.costs.mesh import layout as layout_lib
from planner.costs.mesh import per_device, routing
from planner.counting import count
from planner.ir import flow as flow_lib
from planner.ir import plan as plan_lib
from planner.lower import cut
from rlinf_jax.planning.compiled import executable
from rlinf_jax.runtime.places import place as place_lib
from sharding import rules
from stages import Stage
from stages.learn import minibatches

B, T, GROUP = 64, 128, 2
LINK = cluster_lib.Link(1e-5, 1e10)
DEVICE = cluster_lib.Device('toy', {'float32': 1e10}, 1e9, 4e9, 1e10, 5e9)
# XLA adds up on CPUs what it scatters on others.
CLUSTER = cluster_lib.Cluster(DEVICE, 8, 8, LINK, LINK, scatters_sums=False)


def flow(by, n):
  make = minibatches.minibatches(by, n, 1, GROUP)
  shape = functools.partial(jax.ShapeDtypeStruct, (B, T))
  batch = shape(jnp.int32), shape(jnp.float32)
  step = lambda state, batch, key: (state, make(key, batch[0], *batch))
  return flow_lib.trace(step, (), batch, jax.random.key(0))


def modeled_and_compiled(by, n, axes):
  """Bytes that a device sends, as modeled and in the program of XLA."""
  made = flow(by, n)
  devices = tuple(range(int(np.prod([size for _, size in axes]))))
  placement = plan_lib.Placement(devices, axes)
  chosen = plan_lib.one_place(made.stages, placement)
  model = roofline.Roofline(made, count.of_flow(made), CLUSTER, rules.DEFAULT)
  costs = per_device.stage_costs(made, chosen, model, 'minibatches', B)
  node = next(x for x in made.nodes if x.name == 'minibatches')
  compiled = place_lib.Place('all', placement, {}).compile(made, node)
  sent = executable.read(compiled, axes).collectives
  return costs.collective_bytes, sum(x.bytes for x in sent)


@pytest.mark.parametrize(
  ('n', 'axes'),
  [
    (4, (('data', 8),)),  # Fewer minibatches than devices.
    (8, (('data', 4),)),
    (2, (('data', 2), ('tensor', 4))),
    (4, (('data', 2), ('fsdp', 2), ('tensor', 2))),
    (2, (('fsdp', 4), ('data', 2))),
    (4, (('tensor', 8),)),  # Every device has all rows.
  ],
)
def test_adjacent_rows_are_permuted_as_xla_does(n, axes):
  modeled, compiled = modeled_and_compiled('row', n, axes)
  assert modeled == compiled
  assert (modeled == 0) == (axes == (('tensor', 8),))


@pytest.mark.parametrize(
  ('n', 'axes'),
  [
    (4, (('data', 8),)),
    (2, (('data', 2), ('tensor', 4))),
    (4, (('data', 4), ('tensor', 2))),
    (4, (('fsdp', 2), ('data', 2), ('tensor', 2))),
  ],
)
def test_shuffled_rows_are_looked_up_and_added_up_as_xla_does(n, axes):
  """But for the ids, of four bytes beside 128 tokens of as many."""
  modeled, compiled = modeled_and_compiled('shuffled', n, axes)
  assert modeled == pytest.approx(compiled, rel=0.01)
  assert 0 < modeled < compiled


def test_sums_that_are_scattered_are_sent_once():
  made, axes = flow('shuffled', 4), (('data', 8),)
  layout = roofline.Roofline(
    made, count.of_flow(made), CLUSTER, rules.DEFAULT
  ).layout
  node = made.nodes[-1]
  once, twice = (
    routing.sent(made, node, layout, axes, scatters)[0]
    for scatters in (True, False)
  )
  assert twice == 2 * once == 2 * 7 / 8 * 2 * B * T * 4


@functools.cache
def cut_flow(pieces, *rest):
  """Rows that are doubled in pieces, and added up as a whole."""
  double = Stage(lambda x: x * 2, 'double')
  add_up = Stage(lambda x: x.sum(0), 'add_up', grain='batch')
  step = lambda state, batch, key: (state, add_up(double(batch)))
  batch = jax.ShapeDtypeStruct((B, *rest), jnp.float32)
  return cut.cut(flow_lib.trace(step, (), batch, jax.random.key(0)), pieces)


CUTS = [
  (2, (('data', 8),), (T,)),
  (8, (('data', 8),), (T,)),
  (4, (('data', 2), ('tensor', 4)), (T,)),
  (4, (('data', 2), ('fsdp', 2), ('tensor', 2)), (6, T)),
  (4, (('fsdp', 4), ('data', 2)), (T,)),
  (4, (('tensor', 4),), (T,)),  # Every device has all rows.
  # Devices cannot share another dimension, so they gather all rows.
  (2, (('data', 8),), ()),
  (4, (('data', 4),), (5,)),
]


@pytest.mark.parametrize('kind', ['split', 'join'])
@pytest.mark.parametrize(('pieces', 'axes', 'rest'), CUTS)
def test_pieces_are_split_and_joined_as_xla_does(kind, pieces, axes, rest):
  made = cut_flow(pieces, *rest)
  (node,) = (x for x in made.nodes if x.name == kind)
  devices = tuple(range(int(np.prod([size for _, size in axes]))))
  placement = plan_lib.Placement(devices, axes)
  layout = layout_lib.Layout(rules.DEFAULT)
  modeled, _ = routing.sent(made, node, layout, axes, False)
  compiled = place_lib.Place('all', placement, {}).compile(made, node)
  sent = executable.read(compiled, axes).collectives
  assert modeled == sum(x.bytes for x in sent)
  assert (modeled == 0) == (axes == (('tensor', 4),))


def test_moving_pieces_takes_the_time_of_what_is_sent():
  made = cut_flow(2, T)
  model = roofline.Roofline(made, count.of_flow(made), CLUSTER, rules.DEFAULT)
  axes = (('data', 8),)
  placement = plan_lib.Placement(tuple(range(8)), axes)
  for node in made.nodes:
    if node.name in ('split', 'join'):
      found = model.explain(made, node, placement)
      size, messages = routing.sent(made, node, model.layout, axes, False)
      spent = found['move rows (data)'].value
      assert spent == pytest.approx(
        model.assumed.exposed_communication * LINK.seconds(size, messages)
      )
      assert found.total.value > spent > 0
      alone = model.explain(made, node, plan_lib.Placement())
      assert 'move rows (data)' not in alone


@pytest.mark.parametrize('ways', [2, 3, 4, 8])
def test_as_many_minibatches_as_devices_send_all_but_each_devices_own(ways):
  share, messages = routing.permuted(ways, ways)
  assert share == pytest.approx((ways - 1) / ways)
  assert messages == ways * (ways - 1)
