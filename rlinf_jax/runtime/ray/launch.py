"""Places in other processes, of a run that a gin file describes.

Ray takes seconds to import and is not needed by runs in one process, so this is
the only door to it.
"""

from collections.abc import Callable
import dataclasses
import pathlib
import tempfile
from typing import Any

import jax

from planner.ir import plan as plan_lib
from rlinf_jax import config


@dataclasses.dataclass(frozen=True)
class Recipe:
  """A recipe as text, whose flows any process can record.

  Attributes:
    train: what the recipe calls.
    text: gin, as `config.text` tells it.
    workdir: the run folder.
  """

  train: Callable[..., Any]
  text: str
  workdir: str

  def __call__(self):
    """The flows of a step and of an evaluation."""
    with tempfile.TemporaryDirectory() as folder:
      file = pathlib.Path(folder) / 'config.gin'
      file.write_text(self.text)
      config.parse([str(file)], [], self.workdir)
    return config.call(
      self.train, workdir=self.workdir, instead=lambda flows, *_: flows
    )


def connect(address: str):
  """Connects to Ray, before JAX begins its threads.

  Raises:
    ConnectionError: if there is no such cluster.
  """
  from rlinf_jax.runtime.ray import actor_pool

  actor_pool.connect(address)


def check_measurable():
  """Sees that this process can measure stages for processes that come later.

  Raises:
    ValueError: if its devices are accelerators, which it would keep from them.
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
):
  """The places of a plan, each an actor; starts none yet.

  Args:
    plan: that says which places there are.
    flows: of a step and of an evaluation.
    train: what the recipe calls, `rlinf_jax.train.train`.
    folder: of the run.
    receive_timeout: seconds that a place waits for a value of another.
  """
  from rlinf_jax.runtime.ray import driver

  step, evaluate = flows
  recipe = Recipe(train, config.text(), str(folder))
  return driver.RayRuntime(
    plan, recipe, step=step, evaluate=evaluate, receive_timeout=receive_timeout
  )
