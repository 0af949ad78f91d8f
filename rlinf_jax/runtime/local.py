"""Runs the programs of a plan in this process, a thread a place."""

import collections
from concurrent import futures
import shutil
import tempfile
import weakref

import jax

from planner.costs import cost as cost_lib
from planner.ir import graph as graph_lib
from planner.ir import plan as plan_lib
from rlinf_jax.runtime import host, programs
from rlinf_jax.runtime import lease as lease_lib
from rlinf_jax.runtime import place as place_lib
from sharding import rules as rules_lib


class LocalRuntime(host.Host):
  """A plan's places in this process, holding the state that steps carry.

  Attributes:
    plan: what runs.
    steps: updates begun.
  """

  def __init__(
    self,
    plan: plan_lib.Plan,
    *,
    step: graph_lib.Flow,
    evaluate: graph_lib.Flow | None = None,
    rules: rules_lib.Rules = rules_lib.DEFAULT,
    cost: cost_lib.Cost = cost_lib.EQUAL,
  ):
    """Refuses what the plan cannot run; computes nothing.

    Args:
      plan: how to run them.
      step: as `programs.lower`.
      evaluate: likewise.
      rules: from letters to mesh axes.
      cost: as `programs.lower`.
    """
    lowered = programs.lower(plan, step, evaluate, cost)
    leases = {}
    if plan.shared_devices:
      folder = tempfile.mkdtemp(prefix='rlinf_jax-')
      weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
      leases = lease_lib.of_plan(plan, folder, plan.places)
    places = {
      name: place_lib.Place(name, at, plan.micro_batch, rules, leases.get(name))
      for name, at in plan.places.items()
    }
    super().__init__(lowered, places)
    self.plan, self.steps, self._tree = plan, 0, None

  def transport(self, source: str, target: str, value: graph_lib.Value) -> str:
    """How a value goes from place to place, in words."""
    del source, target, value
    return 'in this process'

  def moved(self) -> dict[tuple[str, str], tuple[int, float]]:
    """As `driver.RayRuntime.moved`: nothing leaves this process."""
    return {}

  def notices(self) -> list[str]:
    """As `driver.RayRuntime.said`: here it is printed as it happens."""
    return []

  def ambient(self):
    """A context in which checkpoints are read straight to where they go."""
    resident = self.lowered['step'].resident
    count = collections.Counter(places[0] for places in resident)
    most = max(count, key=count.get, default=next(iter(self.places)))
    return self.places[most].ambient()

  def load(self, state, steps: int = 0):
    """Lays out `state` as the plan has it; a copy, as steps overwrite it.

    A runtime in which something failed begins anew.

    Args:
      state: the workflow's, as arrays.
      steps: updates that led to it.
    """
    leaves, self._tree = jax.tree.flatten(state)
    super().load(dict(enumerate(leaves)))
    self.steps = steps

  def state(self):
    """The carried state. The next step overwrites it: copy what must last."""
    self.wait()
    leaves = self.leaves()
    return jax.tree.unflatten(
      self._tree, [leaves[i] for i in range(len(leaves))]
    )

  def submit(self, batch, key) -> futures.Future:
    """Begins a step; returns the future of what it reports.

    A step that is begun before the last has ended overlaps with it as far as
    its values allow.
    """
    return self._begin('step', batch, key)

  def step(self, batch, key):
    """One step of the workflow, to its end; returns what it reports."""
    made = self.submit(batch, key)
    self.wait()
    return made.result()

  def evaluate(self, batch, key):
    """Evaluates the state as it is; returns what it reports."""
    made = self._begin('evaluate', batch, key)
    self.wait()
    return made.result()

  def _begin(self, name, *inputs):
    if self.failure:
      raise self.failure
    self.steps += name == 'step'
    made = self.begin(
      name, self.steps + (name != 'step'), jax.tree.leaves(inputs)
    )
    return reported(self.lowered[name].flow, made)


def reported(flow: graph_lib.Flow, made: futures.Future) -> futures.Future:
  """The future of what a flow reports, from that of its outputs by value."""
  told = futures.Future()

  def tell(made):
    error = made.exception()
    if error:
      told.set_exception(error)
      return
    leaves = [made.result()[v] for v in flow.outputs]
    told.set_result(jax.tree.unflatten(flow.gives, leaves))

  made.add_done_callback(tell)
  return told
