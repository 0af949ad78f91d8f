"""The only way from a run to Ray, for a plan whose places are processes.

Importing Ray takes seconds, and runs in one process do not need it. This module
therefore imports the rest of the package inside of functions.
"""

from collections.abc import Callable
import dataclasses
import pathlib
import tempfile
from typing import Any

import jax

from planner.ir import plan as plan_lib
from rlinf_jax import config
from rlinf_jax.run import flows as flows_lib


@dataclasses.dataclass(frozen=True)
class Recipe:
  """A recipe as gin text, from which any process can record the flows.

  Attributes:
    train: the function whose arguments it binds, `rlinf_jax.train.train`.
    text: gin, as `config.text`.
    workdir: the run folder.
  """

  train: Callable[..., Any]
  text: str
  workdir: str

  def __call__(self):
    """Records and returns the flows of a step and of an evaluation."""
    with tempfile.TemporaryDirectory() as folder:
      file = pathlib.Path(folder) / 'config.gin'
      file.write_text(self.text)
      config.parse([str(file)], [], self.workdir)
    return config.call(flows_lib.trace_flows, bindings_of=self.train)


def connect(address: str):
  """Connects to Ray. Call it before JAX starts threads.

  Raises:
    ConnectionError: if there is no cluster at that address.
  """
  from rlinf_jax.runtime.ray import actor_pool

  actor_pool.connect(address)


def check_measurable():
  """Checks that this process may measure stages on its devices.

  Raises:
    ValueError: if they are accelerators. Measuring would occupy them, and the
      processes that run the plan could not use them.
  """
  kind = jax.default_backend()
  if kind != 'cpu':
    raise ValueError(
      f"With `ray_address`, `train.train.plan = 'auto'` measures on the {kind} "
      'of this process, which its places would then lack: bind a plan. '
      '--plan_only finds one for a cluster, and --plan_json writes it.'
    )


def runtime(
  plan: plan_lib.Plan,
  flows,
  train,
  folder: pathlib.Path,
  receive_timeout: float | None,
  network_interface: str | None,
):
  """Makes the `RayRuntime` of a recipe; starts no process yet.

  Args:
    plan: with its places.
    flows: of a step and of an evaluation.
    train: as `Recipe`.
    folder: the run folder.
    receive_timeout: as `RayRuntime`.
    network_interface: likewise.
  """
  from rlinf_jax.runtime.ray import driver

  step, evaluate = flows
  recipe = Recipe(train, config.text(), str(folder))
  return driver.RayRuntime(
    plan,
    recipe,
    step=step,
    evaluate=evaluate,
    receive_timeout=receive_timeout,
    network_interface=network_interface,
  )
