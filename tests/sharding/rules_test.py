import functools
import math
import re

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

from planner.ir import flow as flow_lib
from planner.ir import plan as plan_lib
from rlinf_jax.runtime.places import place as place_lib
from sharding import mesh, rules
from stages import workflows
from stages.learn import optimizers, train_step
import tiny

AXES = {'data': 2, 'fsdp': 2, 'tensor': 2}


def mixed():
  return mesh.mesh(jax.devices(), AXES)


def spec(name, *shape, **kwargs):
  return rules.partition_spec(mixed(), rules.letters_of(name), shape, **kwargs)


def dimensions(*keys, shape):
  path = [jax.tree_util.DictKey(key) for key in keys]
  return rules.dimensions(path, shape)


def params():
  return jax.eval_shape(tiny.policy().init, jax.random.key(0))


@pytest.mark.parametrize(
  'name, letters',
  [
    ('up_DF', 'DF'),
    ('query_DHW', 'DHW'),
    ('key_bias_KW', 'KW'),
    ('up', ''),
    ('UP', ''),
    ('up_DF_', ''),
    ('up_df', ''),
    ('step_1', ''),
    ('a_B_DF', 'DF'),
  ],
)
def test_capitals_after_the_last_underscore_are_dimensions(name, letters):
  assert rules.letters_of(name) == tuple(letters)


def test_letters_become_mesh_axes():
  assert spec('up_DF', 32, 64) == P('fsdp', 'tensor')
  assert spec('out_HWD', 4, 8, 32) == P('tensor', None, 'fsdp')
  assert spec('embed_VD', 16, 32) == P('tensor', 'fsdp')
  assert spec('x_BTD', 8, 5, 3, rules={'B': 'data'}) == P('data', None, None)


def test_rows_are_shared_over_data_and_fsdp():
  assert spec('token_BT', 8, 5) == P(('data', 'fsdp'), None)


def test_an_axis_that_the_mesh_lacks_is_left_out():
  only = mesh.mesh(jax.devices(), {'data': 8})
  assert rules.partition_spec(only, 'DF', (32, 64)) == P(None, None)
  assert rules.partition_spec(only, 'BT', (8, 5)) == P('data', None)


def test_a_dimension_of_one_is_not_shared():
  assert spec('head_DV', 32, 1) == P('fsdp', None)


def test_two_letters_that_want_one_axis_are_refused():
  with pytest.raises(ValueError, match="'tensor' twice, for H and for F"):
    spec('both_HF', 4, 64)
  with pytest.raises(ValueError, match="'fsdp' twice, for B and for D"):
    spec('x_BD', 8, 32)
  with pytest.raises(ValueError, match="'fsdp' twice, for D and for D"):
    spec('square_DD', 32, 32)
  assert spec('twice_WW', 8, 8) == P(None, None)


@pytest.mark.parametrize('size', [3, 5, 33])
def test_a_dimension_that_devices_cannot_share_evenly_is_refused(size):
  message = f'Dimension D .* size {size}, which 2 devices .*fsdp.* evenly'
  with pytest.raises(ValueError, match=message):
    spec('up_DF', size, 64)
  with pytest.raises(ValueError, match='6, which 4 devices of .*data.*fsdp'):
    spec('token_BT', 6, 5)


def test_the_last_key_spells_the_dimensions_and_layers_come_first():
  assert dimensions('up_DF', shape=(32, 64)) == ('D', 'F')
  assert dimensions('layers', 'up_DF', shape=(2, 32, 64)) == ('', 'D', 'F')
  assert dimensions('layers', 'norm_D', shape=(2, 32)) == ('', 'D')
  assert dimensions('step', shape=()) == ()
  assert dimensions('token', shape=(8, 5)) == ('', '')
  assert rules.dimensions((), (3,)) == ('',)


def test_a_name_of_another_rank_spells_nothing():
  assert dimensions('up_DF', shape=(32,)) is None
  assert dimensions('up_DF', shape=(2, 32, 64)) is None  # Not under `layers`.
  assert dimensions('layers', 'up_DF', shape=(7, 2, 32, 64)) is None
  assert dimensions('layers', 'up_DF', shape=(2, 32)) is None  # Not D by F.


def test_the_stack_of_layers_is_never_shared():
  # Were letters aligned left, fsdp would be on the two layers.
  lies = rules.shardings(params(), mixed())
  assert lies['layers']['up_DF'].spec == P(None, 'fsdp', 'tensor')
  assert lies['layers']['query_DHW'].spec == P(None, 'fsdp', 'tensor', None)
  assert lies['embed_VD'].spec == P('tensor', 'fsdp')
  for path, lie in jax.tree_util.tree_flatten_with_path(lies['layers'])[0]:
    assert lie.spec[0] is None, path


@pytest.mark.parametrize(
  'bad, shape',
  [('up', (32, 64)), ('up_D', (32, 64)), ('up_DFW', (32, 64)), ('UP', (3, 4))],
)
def test_a_matrix_whose_name_spells_no_layout_is_refused(bad, shape):
  tree = {'block': {bad: jax.ShapeDtypeStruct(shape, jnp.float32)}}
  message = rf"Parameter \['block'\]\['{bad}'\] of shape .* one letter for each"
  with pytest.raises(ValueError, match=message):
    rules.shardings(tree, mixed())


def test_a_vector_needs_no_letters():
  tree = {'scale': jax.ShapeDtypeStruct((5,), jnp.float32)}
  assert rules.shardings(tree, mixed())['scale'].spec == P(None)


def test_a_refused_parameter_is_named():
  tree = {'embed_VD': jax.ShapeDtypeStruct((15, 32), jnp.float32)}
  with pytest.raises(ValueError, match=r"Parameter \['embed_VD'\]: .* size 15"):
    rules.shardings(tree, mixed())


def layouts(optimizer, axes):
  """By name: each value of a train state, and its sharding on a place."""
  state = jax.eval_shape(
    functools.partial(train_step.init, optimizer=optimizer), params()
  )
  graph = flow_lib.trace(lambda state: (state, ()), state)
  place = place_lib.Place(
    'all', plan_lib.Placement(tuple(range(8)), tuple(axes.items())), {}
  )
  values = [graph.values[start] for start, _ in graph.carry]
  return {value.name: (value, place.layout(value)) for value in values}


def test_moments_lie_where_their_parameters_lie():
  lies = layouts(optimizers.adamw(1e-3), AXES)
  where = {name: lie for name, (_, lie) in lies.items()}
  moments = 0
  for name, lie in where.items():
    for moment in ('.mu.', '.nu.'):
      if moment in name:
        moments += 1
        assert lie == where['state.params.' + name.split(moment)[1]]
  assert moments == 2 * len(jax.tree.leaves(params()))
  assert where['state.params.layers.up_DF'].spec == P(None, 'fsdp', 'tensor')


@pytest.mark.parametrize('axes', [AXES, {'fsdp': 8}], ids=['mixed', 'fsdp'])
@pytest.mark.parametrize('factored', [True, False])
def test_statistics_of_adafactor_are_replicated_and_the_rest_is_sharded(
  axes, factored
):
  optimizer = optax.adafactor(
    1e-3, min_dim_size_to_factor=8 if factored else 128, momentum=0.9
  )
  lies = layouts(optimizer, axes)
  spelled = rules.shardings(params(), mesh.mesh(jax.devices(), axes))
  for path, lie in jax.tree_util.tree_flatten_with_path(spelled)[0]:
    name = '.'.join(key.key for key in path)
    (like, _), shared = lies[f'state.params.{name}'], 0
    for other, (value, layout) in lies.items():
      if other.endswith('.' + name) and value.shape == like.shape:
        assert layout == lie, other
        shared += 1
      elif other.endswith('.' + name):
        assert layout.is_fully_replicated, other
    assert shared >= 2  # The parameter and its momentum.


@pytest.mark.slow
def test_adafactor_steps_on_a_mesh_as_on_one_device():
  optimizer = optax.adafactor(1e-2, min_dim_size_to_factor=8, momentum=0.9)
  fresh = tiny.policy().init(jax.random.key(0))
  state = train_step.init(fresh, optimizer)
  gradient = train_step.Gradient((fresh,), (jnp.ones(()),), {})
  apply = jax.jit(train_step.apply(optimizer))
  want, _ = apply(state, gradient)
  lies = layouts(optimizer, AXES)
  flat, tree = jax.tree.flatten(state)
  sharded = [
    jax.device_put(x, lie)
    for x, (_, lie) in zip(flat, lies.values(), strict=True)
  ]
  assert all(isinstance(x.sharding, NamedSharding) for x in sharded)
  got, _ = apply(jax.tree.unflatten(tree, sharded), gradient)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    norm = jnp.linalg.norm(b)
    assert jnp.linalg.norm(jax.device_get(a) - b) <= 1e-5 * norm


@pytest.mark.parametrize('name', ['generate', 'ref_logp', 'gradient'])
def test_parameters_are_gathered_rather_than_rows_that_share_their_axis(
  name,
):
  workflow = workflows.grpo(
    tiny.policy(), tiny.even, optimizers.adamw(1e-2), group_size=4, kl_coef=0.1
  )
  flow = tiny.trace(workflow, tiny.problem(rows=8))
  placement = plan_lib.Placement(tuple(range(8)), (('fsdp', 8),))
  place = place_lib.Place('all', placement, {})
  node = next(node for node in flow.nodes if node.name == name)
  text = place.compile(flow, node).as_text()
  gathered = re.findall(r'= \w+\[([\d,]*)\]\S* all-gather(?:-start)?\(', text)
  shapes = {
    part
    for start, _ in flow.carry
    for shape in [flow.values[start].shape]
    for part in (shape, shape[1:], (1, *shape[1:]))  # Of all layers, or one.
  }
  assert gathered
  for found in gathered:
    assert tuple(map(int, found.split(','))) in shapes, found


def test_without_a_mesh_hints_do_nothing():
  x = jnp.ones((8, 2))
  assert rules.shard_rows(x) is x
  tree = {'up_DF': x}
  assert rules.gather(tree) is tree


def test_rows_that_devices_cannot_share_are_left_to_the_compiler():
  with jax.set_mesh(mesh.mesh(jax.devices(), {'fsdp': 8})):
    spread = jax.jit(rules.shard_rows)
    assert spread(jnp.ones((6, 2))).shape == (6, 2)
    assert spread(jnp.ones((8, 2))).sharding.spec == P('fsdp')


@pytest.mark.parametrize('letters', [rules.WHOLE, rules.DIVIDED, 'B'])
def test_hints_do_nothing_where_a_device_has_its_own_part(letters):
  x = jnp.arange(32.0).reshape(8, 4)

  def own(x):
    return rules.shard(x, letters)

  mapped = jax.shard_map(
    own,
    mesh=mesh.mesh(jax.devices(), {'fsdp': 8}),
    in_specs=P('fsdp'),
    out_specs=P('fsdp'),
    check_vma=False,
  )
  np.testing.assert_array_equal(jax.jit(mapped)(x), x)


@pytest.mark.parametrize(
  'rows, group', [(4, 1), (8, 2), (16, 4), (12, 1), (6, 2), (2, 2), (32, 4)]
)
def test_a_device_has_the_largest_equal_part_of_a_group(rows, group):
  """Four devices share rows; those that they cannot share stay together."""
  with jax.set_mesh(mixed()):
    assert rules.local_group(4, rows) == group
  assert rules.local_group(4, rows) == math.gcd(4, rows)


def test_gathering_keeps_axes_that_do_not_shard_rows():
  tree = {'up_DF': jnp.ones((32, 64)), 'scale_D': jnp.ones(32)}
  with jax.set_mesh(mixed()):
    gathered = jax.jit(rules.gather)(tree)
  assert gathered['up_DF'].sharding.spec == P(None, 'tensor')
  assert gathered['scale_D'].sharding.is_fully_replicated


def test_what_was_rounded_is_gathered_so():
  """XLA for GPUs gathered stacked layers first, and rounded them after."""

  def rounded(tree):
    return rules.gather(jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree))

  with jax.set_mesh(mixed()):
    traced = jax.make_jaxpr(rounded)({'up_DF': jnp.ones((32, 64))})
  names = [eqn.primitive.name for eqn in traced.eqns]
  assert names == ['convert_element_type', *2 * ['sharding_constraint']]
  # First the layout of the parameter, and then that of all its rows.
  specs = [eqn.params['sharding'].spec for eqn in traced.eqns[1:]]
  assert specs == [P('fsdp', 'tensor'), P(None, 'tensor')]
