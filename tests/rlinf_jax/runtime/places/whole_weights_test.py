"""Which calls are compiled so that they gather whole weights."""

import math
import types

import jax
import pytest

import matrices
from planner.ir import plan as plan_lib
from rlinf_jax.runtime.places import place as place_lib
from rlinf_jax.runtime.places import whole_weights
from sharding import mesh as mesh_lib
from sharding import rules

V5P = types.SimpleNamespace(device_kind='TPU v5')
V5E = types.SimpleNamespace(device_kind='TPU v5 lite')


def options(stage, axes, device=V5P):
  flow = matrices.flow()
  (node,) = (node for node in flow.nodes if node.name == stage)
  mesh = None
  if axes:
    mesh = mesh_lib.mesh(jax.devices()[: math.prod(axes.values())], axes)
  return whole_weights.options(device, mesh, flow, node, rules.DEFAULT)


def test_gradients_on_a_mesh_of_rows_gather_whole_weights_on_v5p():
  for axes in ({'fsdp': 2}, {'data': 2, 'fsdp': 2}, {'fsdp': 2, 'tensor': 1}):
    assert options('gradient', axes) == whole_weights.OPTIONS


@pytest.mark.parametrize(
  ('stage', 'axes', 'device'),
  [
    ('gradient', {'data': 2}, V5P),  # Each device has all weights.
    ('gradient', {'fsdp': 2, 'tensor': 2}, V5P),
    ('gradient', None, V5P),
    ('apply', {'fsdp': 2}, V5P),
    ('gradient', {'fsdp': 2}, V5E),
  ],
)
def test_other_calls_have_the_defaults_of_xla(stage, axes, device):
  assert not options(stage, axes, device)


def test_the_options_of_a_plan_replace_the_default(monkeypatch):
  """Also if it has none of them for a stage."""
  kind = jax.devices()[0].device_kind
  monkeypatch.setattr(whole_weights, 'KINDS', (kind,))
  placement = plan_lib.Placement((0, 1), (('fsdp', 2),))
  flow = matrices.flow()
  (node,) = (node for node in flow.nodes if node.name == 'gradient')
  found = []
  for own in ({}, {'gradient': {}}, {'gradient': {'a': 1}}, {'apply': {}}):
    place = place_lib.Place('all', placement, {}, compiler_options=own)
    found.append(place._options(flow, node))
  assert found == [whole_weights.OPTIONS, {}, {'a': 1}, whole_weights.OPTIONS]
