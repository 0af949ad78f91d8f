"""Bytes that devices send are what one counts by hand."""

import dataclasses
import types

import numpy as np

from planner.costs import work as work_lib
from planner.costs.mesh import collectives, layout
from planner.ir import graph
from sharding import rules
from tests.planner.costs import toy_costs

F32 = np.dtype('float32')


def test_layers_that_devices_share_by_a_later_dimension_are_transposed():
  shapes = {
    'up': ((5, 8, 16), ('', 'D', 'F')),
    'down': ((5, 16, 8), ('', 'F', 'D')),
    'head': ((64, 8), ('V', 'D')),  # No loop gathers it.
  }
  values = [
    graph.Value(name, shape, F32, letters)
    for name, (shape, letters) in shapes.items()
  ]
  flow = types.SimpleNamespace(values=values, constants=())
  stage = types.SimpleNamespace(grain='row')
  node = types.SimpleNamespace(reads=(0, 1, 2), rows=(), writes=(), stage=stage)
  there = collectives.Parameters(flow, node, layout.Layout(rules.DEFAULT))
  down = 4 * 5 * 16 * 8
  assert there.transposed((('fsdp', 4),)) == down / 4
  assert there.transposed((('fsdp', 2), ('tensor', 2))) == down / 4
  # Copies are read as they are, and so are parts for other axes than rows'.
  assert there.transposed((('data', 4),)) == 0
  assert there.transposed((('tensor', 4),)) == 0


def test_devices_that_scatter_no_sums_receive_all_of_the_vocabulary():
  value = graph.Value('embed_VD', (8, 4), F32, ('V', 'D'))
  flow = types.SimpleNamespace(values=[value])
  grad = types.SimpleNamespace(
    reads=(), rows=(), writes=(0,), stage=types.SimpleNamespace(grain='sum')
  )
  there = collectives.Parameters(flow, grad, layout.Layout(rules.DEFAULT))

  def sent(scatters):
    cluster = dataclasses.replace(toy_costs.TOYS, scatters_sums=scatters)
    (scatter,) = collectives.communication(
      there, work_lib.NONE, (('fsdp', 4),), cluster
    )
    return scatter.size

  assert sent(True) == 3 / 4 * 128 and sent(False) == 2 * 3 / 4 * 128


def test_windowed_products_send_more_parts_than_a_gather():
  """Of n parts, n + 1 in steps of a product, and n - 1 in a gather."""
  names = 'layers', 'gradient'
  values = [graph.Value(name, (2, 8, 4), F32, ('', 'D', 'F')) for name in names]
  flow = types.SimpleNamespace(values=values, constants=())
  size = 2 * 8 * 4 * 2  # In bfloat16.

  def sent(
    grain, windowed, scatters=True, n=8, gathers=False, beside=1, **work
  ):
    node = types.SimpleNamespace(
      reads=(0,), rows=(), writes=(1,), stage=types.SimpleNamespace(grain=grain)
    )
    there = collectives.Parameters(flow, node, layout.Layout(rules.DEFAULT))
    cluster = dataclasses.replace(
      toy_costs.TOYS,
      windows_products=windowed,
      scatters_sums=scatters,
      gathers_weights=gathers,
    )
    done = work_lib.Work(matmul={'bfloat16': 1.0}, **work)
    axes = ('fsdp', n), ('tensor', beside)
    some = collectives.communication(there, done, axes, cluster)
    return {part.what: part.size / (size / n) for part in some}

  gather, scatter = 'gather parameters', 'scatter gradients'
  assert sent('row', False) == {gather: 7}
  assert sent('row', True) == {gather: 9}
  assert sent('row', True, n=4) == {gather: 3}
  assert sent('row', True, turns=9.0) == {gather: 7}  # Before the loop.
  assert sent('sum', False) == {gather: 7 + 7, scatter: 7}
  assert sent('sum', True) == {gather: 9 + 7, scatter: 9}
  # A packed row also begins with a forward pass.
  assert sent('sum', True, passes=2.0) == {gather: 9 + 9 + 7, scatter: 9}
  # Without steps, all devices receive the whole sum where none is scattered.
  assert sent('sum', False, False) == {gather: 7 + 7, scatter: 14}
  assert sent('sum', True, False) == {gather: 9 + 7, scatter: 9}
  # Gradients gather whole weights by options of the compiler, others do not.
  assert sent('sum', True, gathers=True) == {gather: 7 + 7, scatter: 7}
  assert sent('row', True, gathers=True) == {gather: 9}
  # Nor do they beside an axis that divides products: half a layer each.
  halves = sent('sum', True, gathers=True, beside=2)
  assert halves[gather] == (9 + 7) / 2 and halves[scatter] == 9 / 2


def test_frozen_layers_are_gathered_as_often_as_products_read_them():
  values = [
    graph.Value(name, shape, F32, letters)
    for name, shape, letters in (
      ('frozen', (2, 8, 4), ('', 'D', 'F')),
      ('table', (64, 8), ('V', 'D')),
      ('trained', (2, 8, 4), ('', 'D', 'F')),
      ('gradient', (2, 8, 4), ('', 'D', 'F')),
    )
  ]
  flow = types.SimpleNamespace(values=values, constants=(0, 1))
  layers, table = 2 * 8 * 4 * 2, 64 * 8 * 2  # In bfloat16.

  def sent(grain, reads, windowed=False, **work):
    writes = (3,) if grain == 'sum' else ()
    node = types.SimpleNamespace(
      reads=(0, 1, 2),
      rows=(),
      writes=writes,
      stage=types.SimpleNamespace(grain=grain),
    )
    there = collectives.Parameters(flow, node, layout.Layout(rules.DEFAULT))
    cluster = dataclasses.replace(toy_costs.TOYS, windows_products=windowed)
    done = work_lib.Work(matmul={'bfloat16': 1.0}, reads=reads, **work)
    some = collectives.communication(there, done, (('fsdp', 8),), cluster)
    (size,) = (x.size for x in some if x.what == 'gather parameters')
    return size * 8

  # Each of seven parts once forward; twice where a gradient passes.
  looked_up = {0: 1.0, 1: 0.0, 2: 2.0}
  assert sent('sum', looked_up) == 7 * (layers + 2 * layers)
  assert sent('sum', {0: 2.0, 1: 1.0, 2: 2.0}) == 7 * (4 * layers + table)
  assert sent('sum', {}) == 7 * (4 * layers + table)  # Not known.
  # Without a gradient, in every turn of a loop that reads them.
  assert sent('row', {**looked_up, 2: 5.0}) == 7 * (layers + 5 * layers)
  assert sent('row', looked_up, True) == 9 * (layers + 2 * layers)
  # Decoding gathers everything before its loop.
  assert sent('row', looked_up, turns=5.0) == 7 * (2 * layers + table)


def test_sums_outside_of_layers_are_scattered_in_their_own_type():
  shapes = ((2, 8, 4), ('', 'D', 'F')), ((8, 4), ('D', 'F'))
  values = [graph.Value('sum', *some[:1], F32, some[1]) for some in shapes]
  flow = types.SimpleNamespace(values=values, constants=())
  node = types.SimpleNamespace(
    reads=(), rows=(), writes=(0, 1), stage=types.SimpleNamespace(grain='sum')
  )
  there = collectives.Parameters(flow, node, layout.Layout(rules.DEFAULT))
  done = work_lib.Work(matmul={'bfloat16': 1.0})
  cluster = dataclasses.replace(toy_costs.TOYS, windows_products=False)
  (part,) = collectives.communication(there, done, (('fsdp', 4),), cluster)
  assert part.size == 3 / 4 * (2 * 8 * 4 * 2 + 8 * 4 * 4)


def test_parts_that_are_scattered_are_added_up_where_no_sum_is_scattered():
  flow = types.SimpleNamespace(values=[], constants=())
  node = types.SimpleNamespace(
    reads=(), rows=(), writes=(), stage=types.SimpleNamespace(grain='row')
  )
  there = collectives.Parameters(flow, node, layout.Layout(rules.DEFAULT))
  # Of 300 bytes, 200 are scattered, which count with half of their bytes.
  done = work_lib.Work(partial={'F': (2.0, 200.0, 100.0)})
  sizes = []
  for scatters in (True, False):
    cluster = dataclasses.replace(toy_costs.TOYS, scatters_sums=scatters)
    (part,) = collectives.communication(there, done, (('tensor', 4),), cluster)
    sizes.append(part.size)
  assert sizes == [2 * 3 / 4 * 200, 2 * 3 / 4 * 300]
