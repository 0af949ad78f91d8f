"""Measures the overhead of interpreting a program.

  python -m experiments.pipelining.overhead

A chain of stages that do nearly nothing: by jitted calls in a loop, each waited
for as the runtime does, and through flow, plan and runtime on one place.
Microseconds an instruction, medians of alternating runs.
"""

import json
import statistics
import time

import jax
import jax.numpy as jnp

from planner.ir import flow as flow_lib
from planner.ir import plan as plan_lib
from rlinf_jax.runtime import local
from rlinf_jax.state import state_readers
import stages

STAGES, ROUNDS, STEPS = 50, 9, 20


def main():
  add = stages.Stage(lambda x: x + 1, 'add')

  def step(state, batch, key):
    del key
    for _ in range(STAGES):
      batch = add(batch)
    return state, batch

  x, key, state = jnp.zeros((8, 8)), jax.random.key(0), jnp.zeros(())
  flow = flow_lib.trace(step, state, x, key)
  runtime = local.LocalRuntime(plan_lib.one_place(flow.stages), step=flow)
  runtime.start(state_readers.FirstState(lambda: state))
  call = jax.jit(lambda x: x + 1).lower(x).compile()
  runtime.step(x, key)
  program = runtime.lowered['step'].programs['all']

  def by_hand():
    y = x
    for _ in range(STAGES):
      y = jax.block_until_ready(call(y))

  def seconds(f):
    start = time.perf_counter()
    for _ in range(STEPS):
      f()
    return (time.perf_counter() - start) / STEPS

  pairs = [
    (seconds(by_hand), seconds(lambda: runtime.step(x, key)))
    for _ in range(ROUNDS)
  ]
  extra = [(ours - hand) / len(program) * 1e6 for hand, ours in pairs]
  result = {
    'instructions': len(program),
    'by_hand_microseconds_per_stage': statistics.median(
      hand / STAGES * 1e6 for hand, _ in pairs
    ),
    'added_microseconds_per_instruction': statistics.median(extra),
  }
  print(json.dumps(result, indent=2))


if __name__ == '__main__':
  main()
