"""Places in other processes, of a run that a gin file describes.

Ray takes seconds to import and is not needed by runs in one process, so this is
the only door to it.
"""

import dataclasses
import pathlib
import tempfile

from planner import plan as plan_lib
from rlinf_jax import config


@dataclasses.dataclass(frozen=True)
class Recipe:
  """A recipe as text, whose flows any process can record.

  Attributes:
    text: gin, as `config.text` tells it.
    workdir: the run folder.
  """

  text: str
  workdir: str

  def __call__(self):
    """The flows of a step and of an evaluation."""
    from rlinf_jax import train  # It asks this module for places.

    with tempfile.TemporaryDirectory() as folder:
      file = pathlib.Path(folder) / 'config.gin'
      file.write_text(self.text)
      config.parse([str(file)], [], self.workdir)
    return config.call(
      train.train, workdir=self.workdir, instead=lambda flows, *_: flows
    )


def start(plan, address: str):
  """Connects to Ray, before JAX begins its threads.

  Raises:
    ValueError: if there is no plan that says which processes are wanted.
    ConnectionError: if there is no such cluster.
  """
  if plan == 'auto':
    raise ValueError(
      "With `ray`, `train.train.plan` must say which places there are: 'auto' "
      'measures the devices of one process. --plan_only finds a plan for a '
      'cluster, and --plan_json writes it.'
    )
  from rlinf_jax.runtime import crew

  crew.start(address)


def place(plan: plan_lib.Plan, flows, folder: pathlib.Path):
  """The places of a plan, each an actor; starts none yet."""
  from rlinf_jax.runtime import cluster

  step, evaluate = flows
  recipe = Recipe(config.text(), str(folder))
  return cluster.Cluster(plan, recipe, step=step, evaluate=evaluate)
