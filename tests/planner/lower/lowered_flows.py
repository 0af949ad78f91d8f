"""Flows of workflows and random ones, lowered for tests."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from planner.ir import flow as flow_lib
from planner.ir import plan
from planner.lower import passes
from stages import workflows
from stages.learn import optimizers
import tiny


@functools.cache
def random_flow(seed):
  rng = np.random.default_rng(seed)
  like = jax.ShapeDtypeStruct((4,), jnp.float32)
  return flow_lib.trace(
    tiny.random_step(seed),
    [like] * rng.integers(1, 5),
    [like] * rng.integers(1, 3),
    jax.eval_shape(jax.random.key, 0),
  )


@functools.cache
def grpo(kl_coef=0.0, num_minibatches=1):
  workflow = workflows.grpo(
    tiny.policy(),
    tiny.even,
    optimizers.adamw(1e-2),
    group_size=4,
    kl_coef=kl_coef,
    num_minibatches=num_minibatches,
  )
  return tiny.trace(workflow, tiny.problem())


@functools.cache
def sft():
  workflow = workflows.sft(tiny.policy(), tiny.even, optimizers.adamw(1e-2))
  return tiny.trace(workflow, tiny.examples())


@functools.cache
def evaluation():
  workflow = workflows.sft(tiny.policy(), tiny.even, optimizers.adamw(1e-2))
  return tiny.trace_evaluation(workflow, tiny.problem())


FLOWS = {
  'grpo': grpo,
  'grpo with kl': functools.partial(grpo, kl_coef=0.1),
  'grpo with updates': functools.partial(grpo, kl_coef=0.1, num_minibatches=2),
  'sft': sft,
  'evaluation': evaluation,
} | {
  f'random {seed}': functools.partial(random_flow, seed) for seed in range(50)
}
each_flow = pytest.mark.parametrize('make', FLOWS.values(), ids=FLOWS)


def lower(graph, **kwargs):
  chosen = plan.one_place(graph.stages, **kwargs)
  ((_, instructions),) = passes.lower(graph, chosen)[1].items()
  return instructions
