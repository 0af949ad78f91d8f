"""The arithmetic job, smaller, on two devices of one core each."""

import pathlib
import tempfile
from typing import Any, NamedTuple

import jax

from planner.costs import roofline
from planner.counting import count
from planner.ir import flow as flow_lib
from planner.ir import graph
from rlinf_jax.planning.profiling import (
  flow_profile,
  machine_profile,
  profile_store,
  stage_profile,
)
from rlinf_jax.prepare import warm_start
from rlinf_jax.state import state_readers
from rlinf_jax.system import allocator as allocator_lib
from sharding import rules
from stages import workflows
from stages.language import huggingface
from stages.learn import losses, optimizers
from stages.tasks import arithmetic

PROBLEMS, GROUP = 16, 8


class Setting(NamedTuple):
  """A flow to plan and its cost model.

  Attributes:
    flow: of a step.
    state: the workflow's, as arrays.
    batch: of a step.
    model: of the costs, measured.
    bare: the same before anything was measured.
  """

  flow: graph.Flow
  state: Any
  batch: Any
  model: roofline.Roofline
  bare: roofline.Roofline


def job(folder: str):
  """The recipe's workflow and source, with a fresh model."""
  checkpoint = warm_start.checkpoint(
    folder,
    corpus=arithmetic.corpus,
    vocabulary=64,
    width=128,
    layers=3,
    heads=4,
    kv_heads=2,
    feed_forward=384,
  )
  return recipe(checkpoint, PROBLEMS)


def recipe(checkpoint: str, problems: int):
  """Workflow and source of a step of so many prompts."""
  workflow = workflows.grpo(
    huggingface.policy(checkpoint, response_length=40),
    arithmetic.verify(checkpoint),
    optimizers.adamw(4e-4),
    group_size=GROUP,
    kl_coef=0.2,
    kl_estimator=losses.kl_k2,
  )
  source = arithmetic.problems(
    checkpoint, batch_size=problems, prompt_length=10, held_out=256
  )
  return workflow, source


def setting() -> Setting:
  """Traces and measures; what was measured before is measured again."""
  allocator_lib.retain_freed_memory()  # As a run does.
  folder = tempfile.mkdtemp()
  workflow, source = job(folder)
  key = jax.random.key(0)
  state = workflow.init(key)
  _, batch = source.next(source.init(0), {})
  flow = flow_lib.trace(workflow.step, state, batch, key)
  memory = profile_store.Store(pathlib.Path(folder) / 'measured')
  bare = roofline.Roofline(
    flow,
    count.of_flow(flow),
    machine_profile.measure_cluster(memory),
    rules.DEFAULT,
  )
  read = start_values(flow, state, batch).read
  model = bare.with_measurements(
    stage_profile.measure(flow, read, bare, memory)
  )
  return Setting(flow, state, batch, model, bare)


def start_values(flow, state, batch) -> flow_profile.StartValues:
  """Inputs and carried values of a flow."""
  inputs = jax.tree.leaves((batch, jax.random.key(0)))
  first = state_readers.FirstState(lambda: state)
  return flow_profile.StartValues(flow, first, inputs)
