"""Rematerialization changes memory and arithmetic, and no result."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from planner.costs.mesh import call_memory, layout
from planner.counting import count
from planner.ir import plan as plan_lib
from rlinf_jax.runtime.places import place as place_lib
from sharding import rules
from stages import remat, workflows
from stages.language import language_model
from tests.rlinf_jax.runtime.plans import invariance_test
import tiny

FULL = 'nothing_saveable'
LAYOUT = layout.Layout(rules.DEFAULT)


@functools.cache
def flow(setting=remat.AUTO, groups=8, max_live_logits=2**26):
  policy = language_model.policy(
    dataclasses.replace(tiny.CONFIG, remat=setting),
    response_length=tiny.LENGTH,
    stop=(0,),
    max_live_logits=max_live_logits,
  )
  workflow = workflows.grpo(
    policy, tiny.even, invariance_test.KEEP, group_size=4
  )
  return tiny.trace(workflow, tiny.problem(groups))


def gradient(step):
  return next(node for node in step.nodes if node.name == 'gradient')


def compiled(step, policy):
  place = place_lib.Place(
    'all', plan_lib.Placement(), {}, remat={'gradient': policy}
  )
  return place.compile(step, gradient(step))


@functools.cache
def works():
  return count.of_flow(flow())


def test_only_stages_that_differentiate_a_model_have_a_choice():
  choices = {name: {*work.remat} for name, work in works().items() if work}
  assert choices.pop('gradient') == {*remat.POLICIES} - {remat.NONE}
  assert not any(choices.values())


def test_less_is_stored_for_more_arithmetic():
  work = works()['gradient']
  some = [work.under(policy).full_batch for policy in remat.POLICIES]
  for more, less in zip(some, some[1:], strict=False):
    assert less.bytes_alive < more.bytes_alive
    assert less.flops > more.flops
  # The forward pass of the layers is computed again, at most once more.
  assert some[-1].matmul_flops < 4 / 3 * some[0].matmul_flops * (1 + 1e-9)


def test_a_model_with_a_policy_of_its_own_leaves_no_choice():
  step = flow(FULL)
  work = count.of_node(step, gradient(step))
  assert not work.remat
  with pytest.raises(ValueError, match=r"counted: choose one of \['none'\]"):
    work.under(FULL)
  with pytest.raises(ValueError, match='no model of the stage leaves it to'):
    compiled(step, FULL)


def test_an_unknown_policy_is_refused():
  with pytest.raises(ValueError, match="remat 'some' is neither 'none' nor"):
    compiled(flow(), 'some')


def test_a_policy_ends_with_the_trace():
  read = set()

  def fn(x):
    assert remat.resolve(remat.AUTO) == FULL
    assert remat.resolve('dots_saveable') == 'dots_saveable'
    return x

  jax.eval_shape(remat.applied(fn, FULL, read), jnp.zeros(()))
  assert read == {FULL}
  assert remat.resolve(remat.AUTO) == remat.NONE


def test_work_between_the_sizes_that_are_counted_is_that_of_a_count():
  step, rows = flow(), 16
  node = gradient(step)
  args = count._arguments(step, node, rows)
  exact = count.work(node.stage.run_with_remat(FULL), *args)
  found = works()['gradient'].near(rows).under(FULL).at(rows)
  assert found.flops == pytest.approx(exact.flops, rel=1e-6)
  assert found.bytes_alive == pytest.approx(exact.bytes_alive, rel=0.02)


def test_segments_share_the_counts_of_their_ends(monkeypatch):
  step, counted, real = flow(), [], count._work_of
  monkeypatch.setattr(
    count, '_work_of', lambda *args: counted.append(args) or real(*args)
  )
  work = count.of_node(step, gradient(step))
  segments = *work.below, work
  assert len(counted) == len(segments) + 1  # Each has two ends.
  for axes in ((), (('tensor', 2),)):
    counted.clear()
    for segment in (*segments, *segments):
      segment.under(FULL).on(axes, LAYOUT)
    assert len(counted) == len(segments) + 1


@pytest.mark.parametrize('axes', [(), (('tensor', 2),)])
def test_a_policy_of_the_plan_counts_as_the_same_policy_of_the_model(axes):
  logits = 8 * tiny.CONFIG.V * tiny.LENGTH  # Of eight rows: more are chunked.
  free, fixed = (
    count.of_node(step, gradient(step))
    for step in (flow(setting, 16, logits) for setting in (remat.AUTO, FULL))
  )
  for rows in (1, 8, 16, 32, 64):  # Of 8, 32 and 64 the work is counted.
    found, wanted = free.near(rows).under(FULL), fixed.near(rows)
    assert found.on(axes, LAYOUT).at(rows) == wanted.on(axes, LAYOUT).at(rows)


def test_stored_activations_of_packed_rows_are_not_sharded_like_parameters():
  policy = tiny.policy(packed_tokens=14)
  step = tiny.trace(
    workflows.grpo(policy, tiny.even, invariance_test.KEEP, group_size=4),
    tiny.problem(),
  )
  node = gradient(step)
  work = count.of_node(step, node)

  def bytes_of(policy, axes):
    execution = plan_lib.Execution(None, policy)
    works = {'gradient': work}
    own = call_memory.within(step, node, axes, execution, 1, works, LAYOUT)
    return own['activations'].value

  alone, shared = (
    bytes_of(remat.NONE, axes) - bytes_of(FULL, axes)
    for axes in ((), (('fsdp', 4),))
  )
  # Sums of gradients are smaller there, so that activations are more of the
  # peak.
  assert shared >= alone > 0
