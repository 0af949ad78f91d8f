import jax
from jax.sharding import AxisType
import pytest

from sharding import mesh


def test_axes_are_in_the_order_given_and_left_to_the_compiler():
  result = mesh.mesh(jax.devices(), {'data': 2, 'fsdp': 4})
  assert dict(result.shape) == {'data': 2, 'fsdp': 4}
  assert result.axis_names == ('data', 'fsdp')
  assert result.axis_types == (AxisType.Auto, AxisType.Auto)


def test_a_mesh_is_of_the_devices_given():
  devices = jax.devices()[4:]
  result = mesh.mesh(devices, {'fsdp': 2, 'tensor': 2})
  assert set(result.devices.flat) == set(devices)


def test_neighbors_along_the_last_axis_are_neighbors():
  result = mesh.mesh(jax.devices(), {'data': 2, 'tensor': 4})
  assert [d.id for d in result.devices.flat] == [d.id for d in jax.devices()]


@pytest.mark.parametrize('axes', [{'data': 4}, {'data': 3, 'fsdp': 3}, {}])
def test_axes_that_do_not_multiply_to_the_devices_are_refused(axes):
  with pytest.raises(ValueError, match=r'needs \d devices, got 8: change'):
    mesh.mesh(jax.devices(), axes)


@pytest.mark.parametrize('kind', [AssertionError, NotImplementedError])
def test_chips_that_cannot_form_a_mesh_are_refused(monkeypatch, kind):
  """As JAX refuses seven chips of a torus."""

  def refuse(*args, **kwargs):
    raise kind

  monkeypatch.setattr(jax, 'make_mesh', refuse)
  with pytest.raises(ValueError, match='7 × .* must fill a box'):
    mesh.mesh(jax.devices()[:7], {'data': 7})
