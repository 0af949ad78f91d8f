"""The flows of a recipe: what one step and one evaluation do."""

from collections.abc import Mapping
import functools
import json
import pathlib
from typing import Any

import jax
import numpy as np

from planner.ir import flow as flow_lib
from planner.ir import graph
from planner.ir import plan as plan_lib
from planner.lower import rounding
from stages import base, kernels

AUTO = 'auto'


def trace_flows(
  workflow: base.Workflow, source: base.Source, seed: int
) -> tuple[graph.Flow, graph.Flow]:
  """Records the flows of a step and of an evaluation; computes no arrays."""
  key, batch = jax.random.key(seed), first_batch(source, seed)
  state = _state_shapes(workflow, batch, key)
  step = flow_lib.trace(workflow.step, state, batch, key)
  evaluate = _trace_evaluation(workflow, source, state)
  return rounding.with_readers(step, evaluate), evaluate


def trace_evaluation(
  workflow: base.Workflow, source: base.Source, seed: int
) -> tuple[graph.Flow, graph.Flow]:
  """Records the flow of an evaluation twice, in the place of a step as well.

  Its state holds only what evaluations read, see `evaluated`.
  """
  key, batch = jax.random.key(seed), first_batch(source, seed)
  state = jax.eval_shape(
    functools.partial(evaluated, workflow, source),
    _state_shapes(workflow, batch, key),
  )
  flow = _trace_evaluation(workflow, source, state)
  return flow, flow


def evaluated(workflow: base.Workflow, source: base.Source, state) -> Any:
  """A state with empty arrays for what evaluations do not read.

  Such as the moments of an optimizer, which need not take memory then.
  """
  flow = _trace_evaluation(workflow, source, state)
  leaves, tree = jax.tree.flatten(state)
  kept = [
    x if start in flow.readers or not x.ndim else _empty(x)
    for x, (start, _) in zip(leaves, flow.carry, strict=True)
  ]
  return jax.tree.unflatten(tree, kept)


def _empty(x):
  """An array without elements, of as many dimensions as `x`."""
  return jax.lax.slice(x, (0,) * x.ndim, (0,) * x.ndim)


def _trace_evaluation(workflow: base.Workflow, source: base.Source, state):
  batches = source.held_out()
  if not batches:
    raise ValueError(
      'The source has no held-out batch: let its `held_out` return one or '
      'more, also where evaluate_every = 0 evaluates on none.'
    )
  _check_rows(batches[0], 'The first held-out batch')
  return flow_lib.trace(
    lambda state, *inputs: (state, workflow.evaluate(state, *inputs)),
    state,
    batches[0],
    jax.random.key(0),
  )


def _check_rows(batch, what: str):
  """Refuses a batch whose arrays have no rows; one without arrays is fine.

  Raises:
    ValueError: says which batch.
  """
  sizes = {x.shape[0] for x in jax.tree.leaves(batch) if np.ndim(x)}
  if sizes == {0}:
    raise ValueError(
      f'{what} of the source has no rows: let the source give batches of at '
      'least one.'
    )


def trace_step(workflow: base.Workflow, batch, key) -> graph.Flow:
  """Records the flow of a step with batches like `batch`."""
  state = _state_shapes(workflow, batch, key)
  return flow_lib.trace(workflow.step, state, batch, key)


def initial_state(
  workflow: base.Workflow, source: base.Source, seed: int
) -> Any:
  """The state before the first step of a run."""
  batch = first_batch(source, seed)
  return first_state(workflow, jax.random.key(seed), batch)


def initial_evaluated(
  workflow: base.Workflow, source: base.Source, seed: int
) -> Any:
  """That state, as `evaluated`."""
  state = initial_state(workflow, source, seed)
  return evaluated(workflow, source, state)


def _state_shapes(workflow: base.Workflow, batch, key):
  return jax.eval_shape(
    functools.partial(first_state, workflow, batch=batch), key
  )


def first_batch(source: base.Source, seed: int) -> Any:
  """The batch of a run's first step."""
  batch = source.next(source.init(seed), {})[1]
  _check_rows(batch, 'The first batch')
  return batch


def first_inputs(source: base.Source, seed: int) -> list[Any]:
  """The inputs of a run's first step, as arrays: a batch and a key."""
  return jax.tree.leaves((first_batch(source, seed), jax.random.key(seed)))


def first_state(workflow: base.Workflow, key: jax.Array, batch) -> Any:
  """The state before a run's first step, with room for batches like `batch`."""
  state = workflow.init(key)
  return workflow.allocate(state, batch) if workflow.allocate else state


def read_plan(
  plan: Mapping[str, Any] | str | None,
  flows: tuple[graph.Flow, graph.Flow],
  *,
  ignore_others: bool = False,
) -> plan_lib.Plan | None:
  """Reads a recipe's plan, completed for the stages of two flows.

  Args:
    plan: a plan as `planner.ir.plan.parse` reads it; or a file of such JSON or
      of the JSON that --plan_json writes; or None to run every stage on the
      first device; or 'auto'.
    flows: of a step and of an evaluation.
    ignore_others: leaves out what the plan says of other stages, and how it
      cuts and orders them. A plan for training then serves an evaluation.

  Returns:
    The plan, or None for 'auto': the plan is yet to be searched for.
  """
  if plan == AUTO:
    return None
  if isinstance(plan, str):
    plan = _read_plan_file(pathlib.Path(plan))
  step, evaluate = flows
  stages = dict.fromkeys((*step.stages, *evaluate.stages))
  if plan and ignore_others:
    plan_lib.check_fields(plan)
    plan = _of_stages(plan, {*stages, plan_lib.REST})
  return plan_lib.parse(plan or {}, stages)


def _read_plan_file(path: pathlib.Path) -> Mapping[str, Any]:
  """Reads the sketch of a plan from JSON.

  Raises:
    ValueError: if there is no such file, or it is not the JSON of a plan.
  """
  if not path.is_file():
    raise ValueError(
      f"plan = '{path}' is neither 'auto' nor a file with the JSON of a plan, "
      'such as --plan_json writes.'
    )
  try:
    plan = json.loads(path.read_text())
  except (ValueError, RecursionError) as error:  # Or of bytes, no text.
    raise ValueError(f'The plan {path} is not JSON: {error}.') from error
  if not isinstance(plan, dict):
    raise ValueError(
      f'The plan {path} holds {plan!r:.40}, and a plan is a JSON object, such '
      'as --plan_json writes.'
    )
  if 'plan' not in plan and 'searched' in plan:
    raise ValueError(
      f'{path} is the report of a search that found no plan: search with more '
      'devices or memory, or for longer (--plan_seconds), or write a plan.'
    )
  return plan.get('plan', plan)  # --plan_json writes more than the plan.


def _of_stages(plan: Mapping[str, Any], stages: set[str]) -> dict[str, Any]:
  """The sketch of a plan for some of its stages, in one piece."""
  kept = {k: v for k, v in plan.items() if k not in ('pieces', 'order')}
  for field in ('stages', 'micro_batch', 'remat', 'compiler_options'):
    if field in kept:
      kept[field] = {k: v for k, v in kept[field].items() if k in stages}
  if 'offload' in kept:
    kept['offload'] = [name for name in kept['offload'] if name in stages]
  return kept


def read_earlier_plan(
  folder: pathlib.Path, flows: tuple[graph.Flow, graph.Flow]
) -> plan_lib.Plan | None:
  """Reads the plan with which a run ended; None if there was no run."""
  file = folder / 'plan.json'
  return read_plan(str(file), flows) if file.exists() else None


def attention(flow: graph.Flow, platform: str) -> str:
  """Names what computes attention in the stages of a flow, and why.

  Args:
    flow: a flow, whose stages were traced.
    platform: what they were traced for; '' is returned if they were not.
  """
  return kernels.describe(_chosen(flow, platform))


def _chosen(flow, platform) -> dict[str, set[kernels.Choice]]:
  chosen = {}
  for node in flow.nodes:
    if node.body:
      chosen |= _chosen(node.body, platform)
    elif not graph.is_plumbing(node):
      some = node.stage.attention.get(platform, set())
      chosen[node.name] = chosen.get(node.name, set()) | some
  return chosen
