"""Activations are divided along the sequence over the mesh axis `tensor`."""

import dataclasses
import functools
import re

import jax
import numpy as np
import pytest

from rlinf_jax.planning.compiled import communication, hlo
from sharding import mesh as mesh_lib
from sharding import rules
from stages.language import language_model
from stages.models import transformer
import tiny

GROUP, GROUPS, P, T = 2, 4, 8, 4
S = P + GROUP * T
AXES = {'fsdp': 2, 'tensor': 2}
CONFIG = dataclasses.replace(tiny.CONFIG, L=3, remat='nothing_saveable')


def rows(columns=P, length=T):
  prompt = tiny.problem(GROUPS, columns).prompt
  prompt = jax.tree.map(lambda x: np.repeat(x, GROUP, 0), prompt)
  rng = np.random.default_rng(0)
  action_BT = rng.integers(1, CONFIG.V, (GROUP * GROUPS, length), np.int32)
  return prompt, action_BT, np.ones(action_BT.shape, np.float32)


def loss(config, capacity, params, prompt, action_BT, mask_BT):
  policy = language_model.policy(
    config, response_length=T, packed_tokens=capacity
  )
  mask = {} if capacity is None else {'mask': mask_BT}
  scores = policy.evaluate(params, prompt, action_BT, group_size=GROUP, **mask)
  return scores.logp.sum()


def compiled(axes, config=CONFIG, capacity=None, columns=P):
  """Value and gradient on a mesh, with its arguments there."""
  mesh = mesh_lib.mesh(jax.devices()[:4], axes)
  params = transformer.init_params(config, jax.random.key(0))
  layouts = rules.shardings(params, mesh)
  by_row = jax.sharding.NamedSharding(
    mesh, jax.sharding.PartitionSpec(rules.mesh_axes(mesh, 'B'))
  )
  args = jax.device_put(params, layouts), *jax.device_put(rows(columns), by_row)
  with jax.set_mesh(mesh):
    run = jax.jit(
      jax.value_and_grad(functools.partial(loss, config, capacity)),
      out_shardings=(None, layouts),
    )
    return run.lower(*args).compile(), args


@pytest.fixture
def in_float64():
  jax.config.update('jax_enable_x64', True)
  yield
  jax.config.update('jax_enable_x64', False)


@pytest.mark.usefixtures('in_float64')
@pytest.mark.parametrize(
  'capacity, columns', [(None, P), (None, P - 1), (16, P)]
)
def test_dividing_the_sequence_changes_only_rounding(capacity, columns):
  config = dataclasses.replace(CONFIG, dtype='float64')
  run, args = compiled(AXES, config, capacity, columns)
  got = jax.device_get(run(*args))
  want = jax.jit(jax.value_and_grad(functools.partial(loss, config, capacity)))(
    *jax.device_get(args)
  )
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11)


def stored(text: str) -> set[tuple[int, ...]]:
  """Shapes of arrays with a layer, a row, a position and a feature."""
  found = re.findall(r'f32\[(\d+),(\d+),(\d+),(\d+)\]', text)
  shapes = {tuple(map(int, shape)) for shape in found}
  return {x for x in shapes if x[0] == CONFIG.L and x[3] == CONFIG.D}


@pytest.mark.parametrize(
  'axes, columns, positions',
  [
    (AXES, P, S // 2),
    (AXES, P - 1, S - 1),  # An odd number, which two devices cannot share.
    ({'fsdp': 2, 'data': 2}, P, S),
  ],
)
def test_what_is_stored_between_layers_is_divided(axes, columns, positions):
  # A row of the model is a group: its prompt, and its completions end to end.
  n = GROUPS // (2 if 'tensor' in axes else 4)
  text = compiled(axes, columns=columns)[0].as_text()
  assert stored(text) == {(CONFIG.L, n, positions, CONFIG.D)}


@pytest.mark.parametrize('capacity', [None, 16])
def test_only_activations_travel_along_the_axis(capacity):
  text = compiled(AXES, capacity=capacity)[0].as_text()
  found = communication.collectives(hlo.parse(text), tuple(AXES.items()))
  along = [one for one in found if one.axis == 'tensor']
  assert {one.kind for one in along} >= {'all-gather', 'all-reduce'}
  row = GROUPS // 2 * S if capacity is None else capacity
  largest = 4 * row * CONFIG.D * 3  # Three cotangents may travel together.
  for one in along:
    assert one.bytes / one.count <= largest, one
