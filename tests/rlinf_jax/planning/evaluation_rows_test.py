"""Rows of evaluations that a plan's meshes cannot divide are said."""

import pytest

from planner.costs.mesh import layout
from planner.ir import plan as plan_lib
from rlinf_jax.planning import evaluation_rows
from sharding import rules
from stages import workflows
from stages.learn import optimizers
import tiny


@pytest.mark.parametrize('rows', [6, 8])
def test_a_plan_that_evaluations_cannot_run_by_is_named(rows):
  workflow = workflows.grpo(
    tiny.policy(), tiny.even, optimizers.adamw(1e-3), group_size=4
  )
  evaluation = tiny.trace_evaluation(workflow, tiny.problem(rows))
  four = {'places': {'all': {'devices': [0, 1, 2, 3], 'axes': [['data', 4]]}}}
  plan = plan_lib.parse(four, evaluation.stages)
  said = evaluation_rows.refusal(evaluation, layout.Layout(rules.DEFAULT), plan)
  if rows == 8:
    assert said is None
  else:
    assert 'has 6 groups of rows there, which 4 shards cannot divide' in said
