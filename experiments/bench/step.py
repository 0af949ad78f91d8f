"""CPU-seconds and wall seconds of a training step, stage by stage."""

from collections.abc import Mapping
import functools
import json
import resource
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import psutil

from planner.ir import flow as flow_lib
from planner.ir import plan as plan_lib
from rlinf_jax.config import config
from rlinf_jax.runtime import local
from rlinf_jax.state import state_readers
import stages
from stages import base, metrics, ranges


def prompts(rows: int, length: int, vocabulary: int) -> base.Problem:
  """Random prompts of equal length, without an answer."""
  rng = np.random.default_rng(0)
  token_BP = rng.integers(1, vocabulary, (rows, length), dtype=np.int32)
  mask_BP = np.ones_like(token_BP)
  return base.Problem(base.Prompt(token_BP, mask_BP), np.zeros(rows, np.int32))


def even_tokens() -> stages.Stage:
  """A verifier without cost: rewards the fraction of even tokens."""

  def judge(answer_B, action_BT, mask_BT):
    del answer_B
    even_B = ((action_BT % 2 == 0) * mask_BT).mean(1)
    return base.Verdict(even_B, (even_B > 0.5).astype(jnp.float32))

  return stages.Stage(judge, 'reward')


def bench(
  workflow: base.Workflow,
  batch: base.Problem,
  *,
  steps: ranges.PositiveInt,
  warmup: ranges.NonNegativeInt = 2,
  plan: Mapping[str, Any] | None = None,
):
  """Runs `warmup` + `steps` steps with the runtime and prints measurements.

  Args:
    workflow: the workflow to run.
    batch: the batch of every step.
    steps: number of measured steps.
    warmup: number of steps before them. The first step is timed from the start
      of the process.
    plan: as `planner.ir.plan.parse` reads it; None runs every stage on the
      first device.

  Raises:
    ValueError: if the recipe binds a parameter that nothing reads.
  """
  key = jax.random.key(0)
  state = jax.eval_shape(workflow.init, key)
  flow = flow_lib.trace(workflow.step, state, batch, key)
  config.refuse_unused()
  runtime = local.LocalRuntime(
    plan_lib.parse(plan or {}, flow.stages), step=flow
  )
  runtime.compile('step')  # While the parameters are initialized.
  runtime.start(state_readers.FirstState(functools.partial(workflow.init, key)))
  wall, cpu, spans, tokens = [], [], [], []
  for i in range(warmup + steps):
    before = time.perf_counter(), time.process_time()
    info = jax.device_get(runtime.step(batch, jax.random.fold_in(key, i)))
    after = time.perf_counter(), time.process_time()
    if not i:
      first = {
        'first_step_seconds': time.time() - psutil.Process().create_time(),
        'first_step_cpu_seconds': time.process_time(),
      }
    wall.append(after[0] - before[0])
    cpu.append(after[1] - before[1])
    spans.append(runtime.timeline.take())
    tokens.append(metrics.read(info)[0]['rollout/tokens'])
  print(flow, '\n')
  runtime.close()
  _report(*(x[warmup:] for x in (wall, cpu, spans, tokens)), first)


def _report(wall, cpu, spans, tokens, first):
  """Prints medians over steps: a table of stages, and a JSON line."""
  names = dict.fromkeys(span.stage for span in spans[0])
  by_stage = {
    name: tuple(
      float(
        np.median(
          [sum(measure(s) for s in step if s.stage == name) for step in spans]
        )
      )
      for measure in (lambda s: s.end - s.start, lambda s: s.cpu)
    )
    for name in names
  }
  print(f'{"stage":14} {"wall ms":>9} {"CPU ms":>9}')
  for name, (seconds, used) in by_stage.items():
    print(f'{name:14} {1e3 * seconds:9.1f} {1e3 * used:9.1f}')
  seconds, used = float(np.median(wall)), float(np.median(cpu))
  print(f'{"step":14} {1e3 * seconds:9.1f} {1e3 * used:9.1f}')
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
  figures = {
    'cpu_seconds_per_step': used,
    'wall_seconds_per_step': seconds,
    **first,
    'tokens_per_second': sum(tokens) / sum(wall),
    'peak_rss_mib': peak,
    'steps': len(wall),
    'stage_wall_seconds': {k: v[0] for k, v in by_stage.items()},
    'stage_cpu_seconds': {k: v[1] for k, v in by_stage.items()},
  }
  print(json.dumps(figures))
