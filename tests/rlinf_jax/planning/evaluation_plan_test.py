"""Stages that only evaluations have: their places, micro-batches and memory."""

import pytest

from planner import cluster as cluster_lib
from planner.costs import roofline
from planner.costs.mesh import layout
from planner.counting import count
from planner.ir import plan as plan_lib
from planner.search import deadline as deadline_lib
from planner.search.plans import space as space_lib
from rlinf_jax.planning import evaluation_plan
from rlinf_jax.runtime import programs
from sharding import rules
from stages import workflows
from stages.learn import optimizers
import tiny

LAYOUT = layout.Layout(rules.DEFAULT)


def grpo():
  return workflows.grpo(
    tiny.policy(), tiny.even, optimizers.adamw(1e-3), group_size=4
  )


@pytest.mark.parametrize('rows', [6, 8])
def test_a_plan_that_evaluations_cannot_run_by_is_named(rows):
  evaluation = tiny.trace_evaluation(grpo(), tiny.problem(rows))
  four = {'places': {'all': {'devices': [0, 1, 2, 3], 'axes': [['data', 4]]}}}
  plan = plan_lib.parse(four, evaluation.stages)
  said = evaluation_plan.refusal(evaluation, LAYOUT, plan)
  if rows == 8:
    assert said is None
  else:
    assert 'has 6 groups of rows there, which 4 shards cannot divide' in said


def test_a_micro_batch_that_evaluations_cannot_have_is_named():
  evaluation = tiny.trace_evaluation(grpo(), tiny.problem(12))
  names = {*STEP.stages, *evaluation.stages}
  for rows in (4, 8):
    plan = plan_lib.one_place(names, micro_batch={'reward': rows})
    said = evaluation_plan.refusal(evaluation, LAYOUT, plan)
    assert (said is None) == (rows == 4)
  assert 'reward has 12 rows there, and takes 8 at a time' in said
  with pytest.raises(ValueError, match='cannot be taken 8 at a time'):
    programs.lower(plan, STEP, evaluation)


STEP = tiny.trace(grpo(), tiny.problem())
WORKS = count.of_flow(STEP)


def model(memory, evaluation=None):
  device = cluster_lib.Device('toy', {'float32': 1e10}, 1e9, memory, 1e9, 1e9)
  link = cluster_lib.Link(1e-6, 1e9)
  there = cluster_lib.Cluster(device, 2, 2, link, link, 0.0)
  return roofline.Roofline(
    STEP, WORKS, there, rules.DEFAULT, evaluation=evaluation
  )


def test_a_search_has_micro_batches_that_evaluations_can_have():
  evaluation = tiny.trace_evaluation(grpo(), tiny.problem(12))
  node = next(node for node in STEP.nodes if node.name == 'reward')
  options = [
    space_lib._micro_batches(STEP, node, costs)
    for costs in (model(1), model(1, evaluation=evaluation))
  ]
  assert options == [(None, 16, 8, 4, 2, 1), (None, 4, 2, 1)]


def test_evaluations_take_as_many_rows_at_once_as_fit_in_memory():
  evaluation = tiny.trace_evaluation(grpo(), tiny.problem(512))
  plan = plan_lib.one_place(STEP.stages)

  def fitted(memory):
    return evaluation_plan.fit(plan, STEP, evaluation, model(memory))

  chosen, words = fitted(1e9)
  assert (words, chosen.micro_batch, chosen.stages['answer']) == (
    None, {}, 'all',
  )  # fmt: skip
  # There is room for a step, and not for all rows of an evaluation.
  chosen, words = fitted(max(model(1e9).memory(STEP, plan, 'all').values()))
  assert (words, chosen.micro_batch) == (None, {'answer': 256})
  programs.lower(chosen, STEP, evaluation)
  # There is room for no parameters.
  chosen, words = fitted(1e5)
  assert chosen.micro_batch['answer'] == 1
  assert words.startswith('Evaluations need too much memory, as it is modeled')


def test_a_plan_is_reported_without_counting_evaluations_past_the_deadline():
  evaluation = tiny.trace_evaluation(grpo(), tiny.problem())
  plan = plan_lib.one_place(STEP.stages)
  late = deadline_lib.Deadline(0.0)
  chosen, words = evaluation_plan.fit(plan, STEP, evaluation, model(1e9), late)
  assert chosen.stages['answer'] == 'all'
  assert words == 'Time was up before the memory of evaluations was known.'
