"""Programs that meshes share: counting traces them once."""

import jax
import jax.numpy as jnp
import pytest

from planner.costs.mesh import layout
from planner.counting import count, divisions
from sharding import mesh as mesh_lib
from sharding import row_map, rules
from stages import workflows
from stages.learn import optimizers
import tiny

LAYOUT = layout.Layout(rules.DEFAULT)
MESHES = [
  (('expert', 2),),
  (('expert', 4),),
  (('tensor', 2),),
  (('tensor', 4),),
  (('expert', 2), ('tensor', 2)),
  (('expert', 4), ('tensor', 2)),
]
PACKED = 32


@pytest.fixture
def flow():
  """GRPO of a mixture of four experts, in packed rows."""
  workflow = workflows.grpo(
    tiny.policy(config=tiny.EXPERTS, packed_tokens=PACKED),
    tiny.even,
    optimizers.adamw(1e-3),
    group_size=4,
  )
  return tiny.trace(workflow, tiny.problem(8))


@pytest.fixture
def traced(monkeypatch):
  """The meshes that a stage was traced for."""
  found, real = [], count._traced

  def trace(fn, shapes, division, platform):
    found.append(division and tuple(division.sizes.items()))
    return real(fn, shapes, division, platform)

  monkeypatch.setattr(count, '_traced', trace)
  return found


def test_work_on_a_mesh_is_that_of_its_own_program(flow, traced):
  (node,) = (node for node in flow.nodes if node.name == 'gradient')
  found = count.of_node(flow, node)
  rows = found.rows
  letters = [flow.values[v].letters for v in node.reads]
  shared = [found.on(axes, LAYOUT).at(rows) for axes in MESHES]
  meshes = set(traced) - {None}
  for axes, one in zip(MESHES, shared, strict=True):
    own = count.work(
      node.stage.fn,  # Which JAX has not traced.
      *count._arguments(flow, node, rows),
      letters=letters,
      division=divisions.Division(axes, LAYOUT),
    )
    assert one.flops == pytest.approx(own.flops)
    assert one.bytes_alive == pytest.approx(own.bytes_alive)
    assert one.bytes_moved == pytest.approx(own.bytes_moved)
    assert one.partial.keys() == own.partial.keys()
    for letter, sums in own.partial.items():
      assert one.partial[letter] == pytest.approx(sums)
  # Packed rows ask how many devices share heads, none how many have experts.
  assert meshes == {MESHES[0], MESHES[2], MESHES[3], MESHES[4]}


def test_programs_note_the_axes_whose_size_they_read():
  found = set()

  def fn(x):
    return rules.shard(x, (None, 'E'))

  run = mesh_lib.noting_sizes(fn, found)
  with jax.sharding.use_abstract_mesh(mesh_lib.abstract(dict(MESHES[4]), None)):
    jax.eval_shape(run, jax.ShapeDtypeStruct((4, 4), 'float32'))
    assert found == {'expert'}
    rules.devices_of('H', 4)  # After the trace.
  assert found == {'expert'}


def test_a_function_that_was_traced_before_notes_its_axes_again():
  """As the layers of decoding, which all stages that decode share."""
  layer = mesh_lib.jitted(lambda x: rules.shard(x, (None, 'E')), inline=True)
  x = jax.ShapeDtypeStruct((4, 4), 'float32')
  for _ in range(2):
    found = set()
    run = mesh_lib.noting_sizes(lambda x: layer(x) + 1, found)
    with jax.sharding.use_abstract_mesh(
      mesh_lib.abstract(dict(MESHES[4]), None)
    ):
      jax.eval_shape(run, x)
    assert found == {'expert'}


def test_kernels_of_heads_count_alike_where_other_axes_differ():
  """Each device computes its heads; those along `expert` all compute them."""
  shape = jax.ShapeDtypeStruct((2, 8, 4, 16), 'float32')
  shapes, found = [shape] * 3 + [jax.ShapeDtypeStruct((2, 8), 'int32')], set()

  def attend(q_BTHW, k_BCHW, v_BCHW, x_BC):
    return jnp.einsum('BTHW,BCHW,BCHX->BTHX', q_BTHW, k_BCHW, v_BCHW)

  def fn(*args):
    return row_map.map_heads(attend, *args)

  one, other = (divisions.Division(axes, LAYOUT) for axes in MESHES[4:])
  traced = count._traced(mesh_lib.noting_sizes(fn, found), shapes, one, None)
  assert found == {'tensor'}
  counted = count._work_of(traced, None, None, other, None)
  assert counted == count.work(fn, *shapes, division=other)
  assert counted.flops > count.work(fn, *shapes, division=one).flops
