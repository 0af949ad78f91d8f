"""Runs a plan in this process, with one thread per place."""

from collections.abc import Callable
from concurrent import futures
import pathlib
import shutil
import tempfile
import weakref

import jax

from planner.ir import graph as graph_lib
from planner.ir import plan as plan_lib
from rlinf_jax.runtime import calls, executor, programs
from rlinf_jax.runtime.places import lease as lease_lib
from rlinf_jax.runtime.places import place as place_lib
from rlinf_jax.state import state_readers
from sharding import rules as rules_lib


class LocalRuntime(calls.Calls, executor.Executor):
  """A `base.Runtime` whose places are threads of this process.

  Attributes:
    plan: the plan in execution.
    steps: number of steps submitted.
  """

  def __init__(
    self,
    plan: plan_lib.Plan,
    *,
    step: graph_lib.Flow,
    evaluate: graph_lib.Flow | None = None,
    rules: rules_lib.Rules = rules_lib.DEFAULT,
    retrace: Callable[..., graph_lib.Flow] | None = None,
  ):
    """Raises ValueError for what the plan cannot run; computes nothing.

    Args:
      plan: how to run the flows.
      step: as `programs.lower`.
      evaluate: likewise.
      rules: from dimension letters to mesh axes.
      retrace: `batch, key -> flow` of a step with a batch of other shapes; None
        where all batches have the shapes of `step`.
    """
    lowered = programs.lower(plan, step, evaluate)
    leases = {}
    if plan.shared_devices:
      folder = tempfile.mkdtemp(prefix='rlinf_jax-')
      weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
      leases = lease_lib.of_plan(plan, folder, plan.places)
    places = {
      name: place_lib.Place(
        name,
        at,
        plan.micro_batch,
        rules,
        leases.get(name),
        remat=plan.remat,
        compiler_options=plan.compiler_options,
      )
      for name, at in plan.places.items()
    }
    super().__init__(lowered, places)
    self.plan, self.steps = plan, 0
    self._retrace, self._notices = retrace, []
    # Names of flows of steps, by the shapes of their inputs.
    self._flow_names = {calls.shapes_of_flow(lowered['step'].flow): 'step'}

  def transport(self, source: str, target: str, value: graph_lib.Value) -> str:
    del source, target, value
    return 'in this process'

  def moved(self) -> dict[tuple[str, str], tuple[int, float]]:
    return {}  # Nothing leaves this process.

  def notices(self) -> list[str]:
    notices, self._notices = self._notices, []
    return notices

  def start(self, state: state_readers.StateReader, steps: int = 0):
    self.read_state(state)
    self.steps = steps

  def start_writing(self, folder: pathlib.Path) -> Callable[[], None]:
    return super().start_writing(folder / 'process')

  def _submit(self, name, *inputs) -> futures.Future:
    if self.failure:
      raise self.failure
    self.steps += name == 'step'
    step = self.steps + (name != 'step')
    if name == 'step':
      name = self._flow_of(inputs)
    outputs = self.submit_flow(name, step, jax.tree.leaves(inputs))
    return calls.info_of(self.lowered[name].flow, outputs)

  def _flow_of(self, inputs) -> str:
    """The name of the flow of a step with such inputs, recorded if it is new.

    Raises:
      ValueError: for shapes that the state, or the plan, cannot follow.
    """
    shapes = calls.shapes_of(inputs)
    if shapes not in self._flow_names and self._retrace:
      flow = self._retrace(*inputs)
      name = f'step {len(self._flow_names) + 1}'
      traced = self.lowered['step']
      self.lowered[name] = programs.lower_like(self.plan, flow, traced)
      self._check()
      self._flow_names[shapes] = name
      self._notices.append(
        f'A step is compiled for batches of shape {shapes[0]}, too: '
        f'{len(self._flow_names)} shapes so far.'
      )
    return self._flow_names.get(shapes, 'step')
