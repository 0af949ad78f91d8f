"""Compares a plan that was found with a loop jitted by hand.

  python -m experiments.prediction.overhead

The arithmetic job on one device: by the runtime, with the plan that 'auto'
finds, and as two jitted functions around the verifier, which is Python. The two
take turns; the ratio is the median of pairs, in wall seconds and in
CPU-seconds.
"""

import json
import statistics
import time

import jax

from experiments.prediction import setting as setting_lib
from planner.search import exact
from planner.search.plans import space as space_lib
from rlinf_jax.runtime import local
from rlinf_jax.state import state_readers

PAIRS = 12


def by_hand(flow, state):
  """`batch, key -> info`: all before the host stage, that one, and the rest."""
  (host,) = (i for i, node in enumerate(flow.nodes) if node.stage.host)
  starts = [start for start, _ in flow.carry]
  ends = [end for _, end in flow.carry]
  first, judge, rest = (
    flow.nodes[:host],
    flow.nodes[host],
    flow.nodes[host + 1 :],
  )
  written = [v for node in first for v in node.writes]
  needed = {v for node in (judge, *rest) for v in node.reads}
  passed = [v for v in written if v in needed]

  def run(nodes, memory):
    for node in nodes:
      args = jax.tree.unflatten(node.in_tree, [memory[v] for v in node.reads])
      memory |= zip(
        node.writes, jax.tree.leaves(node.stage.fn(*args)), strict=True
      )
    return memory

  @jax.jit
  def before(carry, inputs):
    memory = dict(zip(starts, carry, strict=True)) | inputs
    memory = run(first, memory)
    return {v: memory[v] for v in passed}

  def after(carry, inputs, verdict):
    memory = dict(zip(starts, carry, strict=True)) | inputs | verdict
    memory = run(rest, memory)
    return [memory[v] for v in ends], [memory[v] for v in flow.outputs]

  after = jax.jit(after, donate_argnums=0)
  carry = [x.copy() for x in jax.tree.leaves(state)]

  def step(batch, key):
    nonlocal carry
    inputs = dict(zip(flow.inputs, jax.tree.leaves((batch, key)), strict=True))
    handed = before(carry, inputs)
    known = inputs | handed
    args = jax.tree.unflatten(judge.in_tree, [known[v] for v in judge.reads])
    verdict = jax.tree.leaves(judge.stage.run(*args))
    verdict = dict(zip(judge.writes, verdict, strict=True))
    carry, info = after(carry, inputs | handed, verdict)
    return jax.device_get(jax.block_until_ready(info))

  return step


def main():
  setting = setting_lib.setting()
  found = exact.search(
    setting.flow,
    setting.model,
    space_lib.default_space(setting.flow, setting.model),
  )
  print(f'Found: micro-batches of {found.best.micro_batch or "all"}')
  runtime = local.LocalRuntime(found.best, step=setting.flow)
  runtime.start(state_readers.FirstState(lambda: setting.state))
  loops = {
    'auto': lambda batch, key: jax.device_get(runtime.step(batch, key)),
    'by hand': by_hand(setting.flow, setting.state),
  }
  seconds = {name: [] for name in loops}
  for i in range(PAIRS + 2):
    for name in sorted(loops, reverse=i % 2):
      start = time.perf_counter(), time.process_time()
      loops[name](setting.batch, jax.random.key(i))
      end = time.perf_counter(), time.process_time()
      if i > 1:
        seconds[name].append((end[0] - start[0], end[1] - start[1]))
  runtime.close()
  summary = {'micro_batch': found.best.micro_batch}
  for which, what in enumerate(('wall', 'cpu')):
    ratios = [
      a[which] / b[which]
      for a, b in zip(seconds['auto'], seconds['by hand'], strict=True)
    ]
    summary[what] = statistics.median(ratios)
    each = {
      name: statistics.median(t[which] for t in some)
      for name, some in seconds.items()
    }
    print(
      f'{what:4}: auto {each["auto"]:.3f} s, by hand {each["by hand"]:.3f} s, '
      f'{summary[what]:.3f} times'
    )
  print(json.dumps(summary))


if __name__ == '__main__':
  main()
