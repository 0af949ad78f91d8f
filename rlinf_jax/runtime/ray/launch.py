"""The only way from a run to Ray, for a plan whose places are processes.

Importing Ray takes seconds, and runs in one process do not need it. This module
therefore imports the rest of the package inside of functions.
"""

from collections.abc import Callable
import dataclasses
import functools
import pathlib
import tempfile
from typing import Any

import jax

from planner.ir import plan as plan_lib
from rlinf_jax.config import config
from rlinf_jax.runtime import flows as flows_lib
from rlinf_jax.state import state_readers


@dataclasses.dataclass(frozen=True)
class Recipe:
  """A function of a recipe, which any process can call from gin text.

  Attributes:
    train: the function whose arguments it binds, `rlinf_jax.train.train`.
    text: gin, as `config.text`.
    workdir: the run folder.
    function: `workflow, source, seed -> result`, such as
      `flows.trace_flows` and `flows.initial_state`.
  """

  train: Callable[..., Any]
  text: str
  workdir: str
  function: Callable[..., Any]

  def __call__(self):
    """Calls the function with the workflow, source and seed of the recipe."""
    arguments = _arguments(self.train, self.text, self.workdir)
    return self.function(*arguments)


@functools.lru_cache(maxsize=1)
def _arguments(train, text: str, workdir: str):
  """Workflow, source and seed of a recipe, made once by a process."""
  with tempfile.TemporaryDirectory() as folder:
    file = pathlib.Path(folder) / 'config.gin'
    file.write_text(text)
    config.parse([str(file)], [], workdir)
  return config.call(_together, bindings_of=train)


def _together(workflow, source, seed):
  return workflow, source, seed


def first_state_reader(
  train,
  folder: pathlib.Path,
  make: Callable[..., Any] = flows_lib.initial_state,
) -> state_readers.FirstState:
  """A reader, for processes of Ray, of the state before the first step.

  Args:
    train: as `Recipe`.
    folder: the run folder.
    make: `workflow, source, seed -> state`.
  """
  return state_readers.FirstState(
    Recipe(train, config.text(), str(folder), make)
  )


def leave_accelerators():
  """Has this process compute on its CPU: accelerators are for its places.

  It overrides JAX_PLATFORMS. Call it before JAX starts its devices.
  """
  jax.config.update('jax_platforms', 'cpu')


def connect(address: str):
  """Connects to Ray, as a driver. Call it before JAX starts threads.

  Args:
    address: as `connection.connect`.

  Raises:
    ConnectionError: if there is no cluster at that address.
    ValueError: if this process uses accelerators already.
  """
  from rlinf_jax.runtime.ray import connection

  leave_accelerators()
  connection.connect(address)
  if (kind := jax.default_backend()) != 'cpu':
    raise ValueError(
      f'With `ray_address` this process computes on its CPU and its places use '
      f'accelerators, but JAX has started on the {kind} in it: set '
      'JAX_PLATFORMS=cpu for it.'
    )


def check_measurable():
  """Checks that stages can be measured for plan 'auto'.

  Raises:
    ValueError: if places have accelerators, on which that was not tried.
  """
  from rlinf_jax.runtime.ray import resources

  kind = resources.device_kind()
  if kind != 'CPU':
    raise ValueError(
      "With `ray_address`, plan = 'auto' measures stages on CPUs alone, and "
      f'places would have a {kind}: bind a plan. --plan_only finds one for a '
      'cluster, and --plan_json writes it.'
    )


def runtime(
  plan: plan_lib.Plan,
  flows,
  train,
  folder: pathlib.Path,
  receive_timeout: float | None,
  network_interface: str | None,
  trace: Callable[..., Any] = flows_lib.trace_flows,
):
  """Makes the `RayRuntime` of a recipe; starts no process yet.

  Args:
    plan: with its places.
    flows: of a step and of an evaluation.
    train: as `Recipe`.
    folder: the run folder.
    receive_timeout: as `RayRuntime`.
    network_interface: likewise.
    trace: the function that recorded `flows`, as `Recipe`.
  """
  from rlinf_jax.runtime.ray import driver

  step, evaluate = flows
  recipe = Recipe(train, config.text(), str(folder), trace)
  return driver.RayRuntime(
    plan,
    recipe,
    step=step,
    evaluate=evaluate,
    receive_timeout=receive_timeout,
    network_interface=network_interface,
  )
