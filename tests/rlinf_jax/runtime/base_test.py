"""Both runtimes, the mailbox and the place keep the contract of `base`."""

import inspect
import pathlib
import re

import jax.numpy as jnp
import numpy as np
import pytest

from planner.ir import flow as flow_lib
from planner.ir import plan as plan_lib
from rlinf_jax import runtime
from rlinf_jax.runtime import base, local, mailbox
from rlinf_jax.runtime.places import place as place_lib
from rlinf_jax.runtime.ray import driver
import stages

add = stages.Stage(lambda w, x: (w + x.sum(), x.sum()), 'add', 'batch')


def flows():
  args = jnp.zeros(()), np.zeros(4, np.float32), ()
  return flow_lib.trace(lambda w, x, key: add(w, x), *args), None


def local_runtime():
  step, _ = flows()
  return local.LocalRuntime(plan_lib.one_place(step.stages), step=step)


def ray_runtime():
  """Starts no process."""
  step, _ = flows()
  plan = plan_lib.one_place(step.stages)
  return driver.RayRuntime(plan, flows, step=step)


IMPLEMENTATIONS = {
  'LocalRuntime': (base.Runtime, local_runtime),
  'RayRuntime': (base.Runtime, ray_runtime),
  'Mailbox': (base.Mailbox, mailbox.Mailbox),
  'Place': (
    base.Place,
    lambda: place_lib.Place('all', plan_lib.Placement((0,)), {}),
  ),
}


def parameters(method):
  """Name, kind and default of each parameter of a method."""
  return [
    (p.name, p.kind, p.default)
    for p in inspect.signature(method).parameters.values()
  ]


@pytest.mark.parametrize('name', IMPLEMENTATIONS)
def test_an_implementation_has_all_members_of_its_protocol(name):
  protocol, make = IMPLEMENTATIONS[name]
  implementation = make()
  assert isinstance(implementation, protocol)
  if protocol is base.Runtime:
    implementation.close()


@pytest.mark.parametrize('name', IMPLEMENTATIONS)
def test_an_implementation_has_the_signatures_of_its_protocol(name):
  protocol, make = IMPLEMENTATIONS[name]
  implementation = make()
  methods = {
    name: method
    for name, method in vars(protocol).items()
    if inspect.isfunction(method) and not name.startswith('_')
  }
  assert len(methods) >= 5
  for name, method in methods.items():
    assert parameters(method) == parameters(
      getattr(type(implementation), name)
    ), name
    assert method.__doc__, name
  if protocol is base.Runtime:
    implementation.close()


def test_the_runtime_of_threads_does_not_name_ray():
  folder = pathlib.Path(runtime.__file__).parent
  for path in folder.glob('*.py'):
    assert not re.search(r'\bray\b', path.read_text(), re.IGNORECASE), path
