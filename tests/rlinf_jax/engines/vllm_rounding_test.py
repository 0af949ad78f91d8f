"""An engine in bfloat16 is sent its own bits, in half of the bytes."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

import in_memory
from planner.ir import flow as flow_lib
from planner.ir import plan as plan_lib
from rlinf_jax.engines import vllm_engine
from rlinf_jax.runtime import local, programs
from stages import workflows
from stages.language import (
  conversation,
  evaluate,
  huggingface,
  partial_rollout,
  policy_stages,
)
from stages.learn import optimizers
from stages.models import lora
import tiny
import toy_conversation
import vllm_models

pytestmark = vllm_models.marks
DTYPE = 'bfloat16'


def grpo(policy, verify=tiny.even, **kwargs):
  return workflows.grpo(
    policy,
    verify,
    optimizers.adamw(3e-3),
    group_size=vllm_models.GROUP,
    **kwargs,
  )


def runtime_of(workflow, batch):
  """A runtime in which a place has the stages that sample, and no others."""
  step = tiny.trace(workflow, batch)
  examine = flow_lib.trace(
    lambda state, *inputs: (state, workflow.evaluate(state, *inputs)),
    programs.state_shapes(step),
    batch,
    jax.random.key(0),
  )
  plan = plan_lib.parse(
    vllm_models.PLAN, dict.fromkeys((*step.stages, *examine.stages))
  )
  return local.LocalRuntime(plan, step=step, evaluate=examine)


def sent(runtime):
  """Bytes that a step sends to the engine, and the types of parameters."""
  lowered = runtime.lowered['step']
  moved = programs.traffic(lowered, lambda *_: '')
  size = {target: size for _, target, _, size in moved}['actor']
  held = lowered.rounded[()]['actor']
  return size, {lowered.flow.values[v].dtype.name for v in held.values()}


def weights(engine):
  """The parameters of an engine, by name, as vLLM computes with them."""

  def read(worker):
    model = worker.model_runner.get_model()
    return {
      name: (str(x.dtype), x.detach().float().numpy().copy())
      for name, x in model.named_parameters()
    }

  return engine.llm.collective_rpc(read)[0]


def test_an_engine_gets_the_same_bits_in_half_of_the_bytes(case):
  policy = case.policy(dtype=DTYPE)
  config = huggingface.load_config(case.folder, dtype=DTYPE)
  engine = vllm_engine.get(dataclasses.replace(case.settings, config=config))
  batches = [tiny.problem(8, seed=i) for i in range(3)]
  size = sum(x.size for x in jax.tree.leaves(policy.init(jax.random.key(0))))
  found, sizes = [], []
  for p in policy, policy._replace(round_for_engine=None):
    workflow = grpo(p)
    runtime = runtime_of(workflow, batches[0])
    in_memory.start(runtime, workflow.init(jax.random.key(0)))
    seen = []
    for i, batch in enumerate(batches):
      info = jax.device_get(runtime.step(batch, jax.random.key(i)))
      seen.append((info, weights(engine)))
    info = runtime.evaluate(batches[0], jax.random.key(9))
    found.append((seen, jax.device_get(info)))
    sizes.append(sent(runtime))
    runtime.close()
  jax.tree.map(np.testing.assert_array_equal, *found)
  ((first, *_), _), _ = found
  assert {kind for kind, _ in first[1].values()} == {'torch.bfloat16'}
  assert sizes[1][0] - sizes[0][0] == 2 * size
  assert [kinds for _, kinds in sizes] == [{DTYPE}, set()]
  engine.close()


def partial(policy):
  settings = {'max_carry': 2, 'extra_groups': 2}
  return grpo(
    policy,
    rollouts=functools.partial(partial_rollout.partial_rollouts, **settings),
  )


def talk(policy):
  converse = toy_conversation.converse(3)
  return grpo(
    policy,
    conversation.episode_return(),
    rollouts=functools.partial(policy_stages.complete, converse=converse),
    evaluator=functools.partial(evaluate.evaluate, converse=converse),
  )


@pytest.mark.parametrize('make', [partial, talk])
def test_all_stages_of_an_engine_say_what_it_rounds(case, make):
  sizes = []
  for dtype in 'float32', DTYPE:
    policy = case.policy(dtype=dtype)
    runtime = runtime_of(make(policy), tiny.problem(8))
    sizes.append(sent(runtime))
    runtime.close()
  params = jax.eval_shape(policy.init, jax.random.key(0))
  size = sum(x.size for x in jax.tree.leaves(params))
  assert sizes[0][0] - sizes[1][0] == 2 * size
  assert [kinds for _, kinds in sizes] == [set(), {DTYPE}]


def test_adapters_are_sent_as_they_are(case):
  policy = case.policy(dtype=DTYPE, lora=lora.Lora(rank=4))
  runtime = runtime_of(grpo(policy), tiny.problem(8))
  assert not any(runtime.lowered['step'].rounded[()].values())
  runtime.close()
