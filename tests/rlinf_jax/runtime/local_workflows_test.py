"""Workflows on one place equal the eager ones bit for bit."""

import functools
import types

import jax
import numpy as np
import pytest

import claims
import in_memory
from planner.ir import plan
from rlinf_jax.runtime import flows, local, timeline
from stages import workflows
from stages.learn import optimizers
import tiny


def local_of(workflow, batch, held_out=None, **kwargs):
  """A runtime of a workflow on one place."""
  step = tiny.trace(workflow, batch)
  evaluate = None
  if held_out is not None:
    evaluate = tiny.trace_evaluation(workflow, held_out)
  names = dict.fromkeys(step.stages + (evaluate.stages if evaluate else ()))
  return local.LocalRuntime(
    plan.one_place(names, **kwargs), step=step, evaluate=evaluate
  )


def grpo(verify, **kwargs):
  return workflows.grpo(
    tiny.policy(), verify, optimizers.adamw(1e-2), group_size=4, **kwargs
  )


def run(workflow, batches, held_out, steps=3):
  """Runs a workflow eagerly and planned; returns pairs to compare."""
  keys = list(jax.random.split(jax.random.key(7), steps))
  state = workflow.init(jax.random.key(0))
  first = tiny.arrays(state)
  planned = local_of(workflow, batches[0], held_out)
  in_memory.start(planned, state)
  pairs = []
  before = planned.evaluate(held_out, keys[0])
  pairs.append((before, workflow.evaluate(state, held_out, keys[0])))
  planned.timeline.take()
  spans = []
  for batch, key in zip(batches, keys, strict=True):
    got = planned.step(batch, key)
    spans.append(planned.timeline.take())
    state, want = workflow.step(state, batch, key)
    pairs.append((got, want))
    pairs.append((tiny.arrays(in_memory.state(planned)), tiny.arrays(state)))
  return types.SimpleNamespace(
    workflow=workflow,
    planned=planned,
    state=state,
    first=first,
    pairs=pairs,
    spans=spans,
    held_out=held_out,
    keys=keys,
  )


@functools.cache
def grpo_run():
  return run(
    grpo(tiny.even_on_host, kl_coef=0.1, num_minibatches=2),
    [tiny.problem(seed=i) for i in range(3)],
    tiny.problem(4, seed=9),
  )


OPTIONS = {
  'plain': {},
  'minibatches': {'num_minibatches': 2},
  'kl': {'kl_coef': 0.1},
}


@pytest.mark.slow
@pytest.mark.parametrize('name', claims.some(OPTIONS, ['plain']))
def test_planned_grpo_is_eager_grpo_bit_for_bit(name):
  batches = [tiny.problem(seed=i) for i in range(3)]
  for got, want in run(
    grpo(tiny.even, **OPTIONS[name]), batches, tiny.problem(4, seed=9)
  ).pairs:
    tiny.assert_same_bits(got, want)


@pytest.mark.slow
def test_planned_grpo_with_all_options_is_eager_grpo_bit_for_bit():
  for got, want in grpo_run().pairs:
    tiny.assert_same_bits(got, want)


@pytest.mark.slow
def test_planned_sft_is_eager_sft_bit_for_bit():
  sft = workflows.sft(tiny.policy(), tiny.even, optimizers.adamw(1e-2))
  batches = [tiny.examples(seed=i) for i in range(3)]
  for got, want in run(sft, batches, tiny.problem(4, seed=9)).pairs:
    tiny.assert_same_bits(got, want)


@pytest.mark.slow
def test_the_reference_is_not_overwritten_with_the_actor_it_started_from():
  done = grpo_run()
  tiny.assert_same_bits(
    in_memory.state(done.planned).reference,
    done.workflow.init(jax.random.key(0)).reference,
  )
  for name, x in tiny.arrays(
    in_memory.state(done.planned).actor.params
  ).items():
    assert not np.array_equal(x, done.first[f'.actor.params{name}']), name


@pytest.mark.slow
def test_an_evaluation_leaves_the_state_as_it_was():
  done = grpo_run()
  before, steps = tiny.arrays(in_memory.state(done.planned)), done.planned.steps
  one, two = (done.planned.evaluate(done.held_out, done.keys[0]) for _ in '12')
  tiny.assert_same_bits(one, two)
  tiny.assert_same_bits(
    one, done.workflow.evaluate(done.state, done.held_out, done.keys[0])
  )
  tiny.assert_same_bits(in_memory.state(done.planned), before)
  assert done.planned.steps == steps == 3
  # The run is shared between tests: remove these spans.
  assert 'answer' in timeline.seconds(done.planned.timeline.take())


@pytest.mark.slow
def test_the_timeline_holds_each_call_in_order():
  done = grpo_run()
  calls = [node.name for node in done.planned.lowered['step'].flow.nodes]
  ends = 0.0
  for step, spans in enumerate(done.spans, 1):
    assert [span.stage for span in spans] == calls
    assert {(span.step, span.place) for span in spans} == {(step, 'all')}
    for span in spans:
      assert ends <= span.start <= span.end
      ends = span.end
    assert set(timeline.seconds(spans)) == set(calls)
    total = sum(timeline.seconds(spans).values())
    assert total == pytest.approx(sum(s.end - s.start for s in spans))
  assert done.planned.timeline.take() == []


# A small learner: parameters move towards rewarded rows.


@pytest.mark.slow
def test_batches_of_other_shapes_are_compiled_once_each_and_change_no_bit():
  workflow = grpo(tiny.even_on_host, num_minibatches=2)
  batches = [tiny.problem(columns=n, seed=n) for n in (7, 3, 7, 3, 5)]
  planned = local.LocalRuntime(
    plan.one_place(tiny.trace(workflow, batches[0]).stages),
    step=tiny.trace(workflow, batches[0]),
    retrace=functools.partial(flows.trace_step, workflow),
  )
  state = workflow.init(jax.random.key(0))
  in_memory.start(planned, state)
  notices = []
  for i, batch in enumerate(batches):
    key = jax.random.key(i)
    got = planned.step(batch, key)
    notices += planned.notices()
    state, want = workflow.step(state, batch, key)
    tiny.assert_same_bits(got, want)
  tiny.assert_same_bits(
    tiny.arrays(in_memory.state(planned)), tiny.arrays(state)
  )
  assert [x.split(': ')[1] for x in notices] == [
    '2 shapes so far.',
    '3 shapes so far.',
  ]
