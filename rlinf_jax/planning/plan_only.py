"""`plan_only`: plans a recipe for a cluster without running it."""

from collections.abc import Mapping, Sequence
import os
import types
from typing import Any

from planner import cluster as cluster_lib
from planner.search import result as result_lib
from rlinf_jax.config import config
from rlinf_jax.planning import plan_report
from rlinf_jax.planning.compiled import topology as topology_lib
from rlinf_jax.runtime import flows as flows_lib
from stages import base, ranges


def plan_only(
  workflow: base.Workflow,
  source: base.Source,
  *,
  seed: ranges.NonNegativeInt,
  plan: Mapping[str, Any] | str | None,
  cluster: cluster_lib.Cluster,
  lengths: Sequence[int] | None = None,
  answer_seconds: tuple[float, ...] = (),
  host_seconds: Mapping[str, float] = types.MappingProxyType({}),
  plan_seconds: ranges.NonNegativeFloat = 60.0,
  compile_for: topology_lib.Topology | None = None,
  compile_runners_up: ranges.NonNegativeInt = 0,
  output: str | os.PathLike | None = None,
  page: str | os.PathLike | None = None,
) -> result_lib.SearchResult:
  """Prints the fastest plan of a recipe on a cluster, and why it is.

  The first four arguments are those of `train.train`, with its defaults.

  Args:
    workflow: the workflow to plan.
    source: its batches.
    seed: of the first batch.
    plan: the recipe's own plan, to compare with; 'auto' for none.
    cluster: the hardware, which need not be here.
    lengths: tokens of completions like those that will be generated; None
      assumes that all reach the limit.
    answer_seconds: seconds that environments took to answer turns; none where
      they were not measured.
    host_seconds: measured seconds of a row of host stages, as
      `plan_report.report_plan` has it.
    plan_seconds: limit of the searches and of what the report adds to them, as
      `plan_report.report_plan` has it.
    compile_for: devices to compile the plan for, as `plan_report.report_plan`.
    compile_runners_up: slower plans to compile, likewise.
    output: file for the plan and its explanation as JSON.
    page: file for the same as an HTML page.

  Raises:
    ValueError: if the recipe binds a parameter that nothing reads.
  """
  flows = flows_lib.trace_flows(workflow, source, seed)
  own = flows_lib.read_plan(plan, flows)
  config.refuse_unused()
  return plan_report.report_plan(
    flows,
    workflow.staleness,
    own,
    cluster=cluster,
    lengths=lengths,
    answer_seconds=answer_seconds,
    host_seconds=host_seconds,
    seconds=plan_seconds,
    compile_for=compile_for,
    compile_runners_up=compile_runners_up,
    output=output,
    page=page,
  )
