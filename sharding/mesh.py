"""Meshes: devices in a grid with named axes."""

import collections
from collections.abc import Callable, Iterable, Mapping, Sequence
import contextlib
import contextvars
import functools
import math

import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh

# The axes whose size the program that is being traced has read.
_noted = contextvars.ContextVar('noted', default=None)


def mesh(devices: Sequence[jax.Device], axes: Mapping[str, int]) -> Mesh:
  """A mesh of `devices`, e.g. `mesh(jax.devices(), {'data': 2, 'fsdp': 4})`.

  Axes are `Auto`: stages name no layouts, and XLA propagates those of their
  inputs. (JAX defaults to `Explicit`, under which every gather states its own.)

  Raises:
    ValueError: if the axes do not multiply to the number of devices, or these
      TPU chips cannot form such a mesh.
  """
  need = math.prod(axes.values())
  if len(devices) != need:
    raise ValueError(
      f'A mesh of {dict(axes)} needs {need} devices, got {len(devices)}: '
      'change the axes or the devices so that the two agree.'
    )
  try:
    return jax.make_mesh(
      tuple(axes.values()),
      tuple(axes),
      devices=devices,
      axis_types=(AxisType.Auto,) * len(axes),
    )
  # JAX wants chips that fill a box of the interconnect, and axes that fit it.
  except (AssertionError, NotImplementedError) as error:
    raise ValueError(
      f'{len(devices)} × {devices[0].device_kind} cannot form a mesh of '
      f'{dict(axes)}: chips must fill a box of their interconnect, whose sides '
      'the axes divide. Choose other devices or axes.'
    ) from error


def platform() -> str:
  """The platform that is traced for, such as 'tpu'.

  It is that of the devices of the ambient mesh, which need not be here, or else
  JAX's default.
  """
  device = jax.sharding.get_abstract_mesh().abstract_device
  return device.platform if device else jax.default_backend()


def abstract(axes: Mapping[str, int], platform: str | None) -> AbstractMesh:
  """A mesh of devices that are not here, to trace with.

  Args:
    axes: names and sizes of its axes; empty for one device without axes.
    platform: that of the devices; None for JAX's default.
  """
  device = platform and AbstractDevice(platform, None, platform)
  return AbstractMesh(
    tuple(axes.values()), tuple(axes), abstract_device=device or None
  )


def devices_along(mesh: Mesh | AbstractMesh, axes: Iterable[str]) -> int:
  """The number of devices along some axes of a mesh together.

  Programs read sizes here alone, so that `noting_sizes` knows of them.
  """
  axes, noted = tuple(axes), _noted.get()
  if noted is not None:
    noted.update(axes)
  return math.prod(mesh.shape[axis] for axis in axes)


def noting_sizes(fn: Callable, found: set[str]) -> Callable:
  """Returns `fn` for tracing, which notes the axes whose sizes it reads.

  Two meshes with the same axes have the same program, if those that were noted
  have the same sizes in both.

  Args:
    fn: a function that JAX can trace.
    found: names of axes, to which it adds.
  """

  @functools.wraps(fn)
  def run(*args):
    token = _noted.set(found)
    try:
      return fn(*args)
    finally:
      _noted.reset(token)

  return run


def jitted(fn: Callable, **settings) -> Callable:
  """Returns `jax.jit(fn)`, for a function that several programs call.

  A call that JAX has traced before reads no sizes of axes, so those that were
  read on the same mesh are noted again.

  Args:
    fn: a function that JAX can trace.
    **settings: those of `jax.jit`.
  """
  read = collections.defaultdict(set)  # By mesh.

  @functools.wraps(fn)
  def traced(*args, **named):
    found = set()
    result = noting_sizes(functools.partial(fn, **named), found)(*args)
    read[jax.sharding.get_abstract_mesh()] |= found
    return result

  call = jax.jit(traced, **settings)

  @functools.wraps(fn)
  def run(*args, **named):
    result, noted = call(*args, **named), _noted.get()
    if noted is not None:
      noted.update(read[jax.sharding.get_abstract_mesh()])
    return result

  return run


def on_device(device: jax.Device) -> contextlib.AbstractContextManager:
  """The context in which a call for one device is traced."""
  if device.platform == jax.default_backend():
    return contextlib.nullcontext()
  return jax.sharding.use_abstract_mesh(abstract({}, device.platform))
