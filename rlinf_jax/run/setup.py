"""Set-up of a run: its runtime, with a state loaded into it."""

from collections.abc import Callable, Sequence
import functools
import pathlib
from typing import Any

from planner.ir import graph
from planner.ir import plan as plan_lib
from rlinf_jax.config import config
from rlinf_jax.planning import autoplan
from rlinf_jax.planning import monitor as monitor_lib
from rlinf_jax.planning.profiling import flow_profile
from rlinf_jax.run_files import checkpoint as checkpoint_lib
from rlinf_jax.runtime import base as runtime_base
from rlinf_jax.runtime import flows as flows_lib
from rlinf_jax.runtime import local, programs
from rlinf_jax.runtime.ray import launch
from rlinf_jax.state import state_readers
from stages import base


def make_runtime(
  plan: plan_lib.Plan,
  *,
  flows: tuple[graph.Flow, graph.Flow],
  train: Callable[..., Any],
  folder: pathlib.Path,
  use_ray: bool,
  receive_timeout: float | None,
  network_interface: str | None,
  retrace: Callable[..., graph.Flow] | None = None,
  trace: Callable[..., Any] = flows_lib.trace_flows,
) -> runtime_base.Runtime:
  """Makes the runtime of a plan, of threads or Ray processes, without a state.

  Args:
    plan: the plan to run.
    flows: of a step and of an evaluation.
    train: the function that the recipe configures, `rlinf_jax.train.train`.
    folder: the run folder.
    use_ray: runs every place in a Ray process.
    receive_timeout: seconds for which a Ray process waits for a value.
    network_interface: on which Ray processes listen, as `ActorPool`.
    retrace: `batch, key -> flow` of a step with a batch of other shapes.
    trace: the function that recorded `flows`.
  """
  step, evaluate = flows
  if use_ray:
    return launch.runtime(
      plan, flows, train, folder, receive_timeout, network_interface, trace
    )
  return local.LocalRuntime(plan, step=step, evaluate=evaluate, retrace=retrace)


def connect(address: str | None, plan: Any):
  """Connects to Ray if an address is given.

  With plan 'auto', also checks that stages can be measured in the cluster.

  Args:
    address: as `launch.connect`; None without Ray.
    plan: of the recipe.

  Raises:
    ConnectionError: if there is no cluster at that address.
    ValueError: if this process uses accelerators already, or the cluster cannot
      be measured.
  """
  if address:
    launch.connect(address)
    if plan == flows_lib.AUTO:
      launch.check_measurable()


def first_state_reader(
  workflow: base.Workflow,
  source: base.Source,
  seed: int,
  *,
  train: Callable[..., Any],
  folder: pathlib.Path,
  use_ray: bool,
  make: Callable[..., Any] = flows_lib.initial_state,
) -> state_readers.FirstState:
  """A reader of the state before the first step, for the processes of a run.

  Args:
    workflow: the workflow to run.
    source: its batches.
    seed: of the parameters.
    train: as `make_runtime`.
    folder: likewise.
    use_ray: likewise; processes of Ray read the recipe again.
    make: `workflow, source, seed -> state`.
  """
  if use_ray:
    return launch.first_state_reader(train, folder, make)
  return state_readers.FirstState(
    functools.partial(make, workflow, source, seed)
  )


def measure(
  *,
  flows: tuple[graph.Flow, graph.Flow],
  train: Callable[..., Any],
  folder: pathlib.Path,
  use_ray: bool,
  state: state_readers.StateReader,
  inputs: Sequence[Any],
  trace: Callable[..., Any] = flows_lib.trace_flows,
) -> flow_profile.Profile:
  """Measures the stages of a step, in this process or in one of Ray.

  Args:
    flows: of a step and of an evaluation.
    train: as `make_runtime`.
    folder: the run folder.
    use_ray: measures in a process of Ray, so that this one holds no state.
    state: as `flow_profile.measure`.
    inputs: likewise.
    trace: the function that recorded `flows`.
  """
  if use_ray:
    from rlinf_jax.planning.profiling import profiler  # It imports Ray.

    recipe = launch.Recipe(train, config.text(), str(folder), trace)
    return profiler.measure(recipe, state, inputs)
  return flow_profile.measure(flows[0], state, inputs, print_line=print)


def prepare_runtime(
  workflow: base.Workflow,
  source: base.Source,
  seed: int,
  *,
  flows: tuple[graph.Flow, graph.Flow],
  first: state_readers.StateReader,
  runtime: runtime_base.Runtime | None,
  make_runtime: Callable[..., runtime_base.Runtime],
  **processes,
):
  """Returns the runtime of a run, without a state, and the monitor of its plan.

  Without a `runtime`, its plan is that of the run folder, which a run that is
  resumed has found before, or is searched for.

  Args:
    workflow: the workflow to run.
    source: its batches; stages are measured with the first.
    seed: of the parameters and of that batch.
    flows: of a step and of an evaluation.
    first: reads the first state.
    runtime: the runtime, or None to search for a plan and make its runtime.
    make_runtime: `plan -> runtime`.
    **processes: `train`, `folder` and `use_ray`, as for `make_runtime` above.

  Returns:
    The runtime, and the monitor of a plan that was searched for, else None.
  """
  monitor, staleness = None, workflow.staleness
  if not runtime:
    inputs = flows_lib.first_inputs(source, seed)
    chosen = autoplan.find_plan(
      flows,
      staleness,
      functools.partial(
        measure, **processes, flows=flows, state=first, inputs=inputs
      ),
      flows_lib.read_earlier_plan(processes['folder'], flows),
    )
    monitor = monitor_lib.PlanMonitor(flows, staleness, chosen, make_runtime)
    runtime = monitor.runtime()
  runtime.compile('step')  # While the parameters are read.
  return runtime, monitor


def start_runtime(
  runtime: runtime_base.Runtime,
  first: state_readers.FirstState,
  source: base.Source,
  seed: int,
  checkpoints: checkpoint_lib.Checkpoints,
  resume: bool,
) -> checkpoint_lib.CheckpointState:
  """Starts a runtime from the newest checkpoint, or from the first state.

  Args:
    runtime: of the run.
    first: reads the first state.
    source: the batches of the run.
    seed: of its first state.
    checkpoints: of the run.
    resume: whether the run resumes from a checkpoint, if there is one.

  Returns:
    The state from which training starts.

  Raises:
    ValueError: for a checkpoint of a source of other files.
  """
  source_state = source.init(seed)
  start = checkpoint_lib.CheckpointState(0, first, source_state, {})
  if resume and checkpoints.latest() is not None:
    shapes = programs.state_shapes(runtime.lowered['step'].flow)
    start = checkpoints.load(shapes, first, source_state)
    if source.check:
      source.check(start.source)
  runtime.start(start.state, start.step)
  return start
