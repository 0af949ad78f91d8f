"""Plans of two devices, each predicted and then run.

  python -m experiments.prediction.plans

Prints a table, Kendall's τ over the pairs that differ by more than 15 %, and
how much slower the plan predicted to be the fastest is than the one that was.
"""

import itertools
import json
import os
import statistics
import time

# A core a device: they share nothing but memory, as accelerators would.
os.environ['XLA_FLAGS'] = (
  '--xla_force_host_platform_device_count=2 --xla_cpu_multi_thread_eigen=false'
)

import jax

from experiments.prediction import setting as setting_lib
from planner.costs import cost_table
from planner.ir import plan as plan_lib
from planner.lower import passes
from rlinf_jax.planning import autoplan
from rlinf_jax.runtime import local
from rlinf_jax.state import state_readers

STEPS, WARM, ROUNDS = 4, 2, 3
DIFFERENT = 1.15  # Ratio of measured medians that counts as a difference.
TWO = {'places': {'a': {'devices': [0]}, 'b': {'devices': [1]}}}
DATA = {'places': {'all': {'devices': [0, 1], 'axes': [['data', 2]]}}}
FSDP = {'places': {'all': {'devices': [0, 1], 'axes': [['fsdp', 2]]}}}
ACT = ('repeat', 'keys', 'generate')


def split(first, **more):
  """`first` on one device, all else on the other."""
  return TWO | {'stages': dict.fromkeys(first, 'a') | {'*': 'b'}} | more


SKETCHES = {
  'one device': {},
  'one device, 8 rows at a time': {'micro_batch': {'gradient': 8}},
  'one device, 32 rows at a time': {
    'micro_batch': {'gradient': 32, 'ref_logp': 32}
  },
  'one device, offloads': {'offload': ['apply', 'ref_logp']},
  'data=2': DATA,
  'data=2, 16 rows at a time': DATA | {'micro_batch': {'gradient': 16}},
  'fsdp=2': FSDP,
  'generate | rest': split(ACT),
  'generate | rest, 2 pieces': split(ACT, pieces=2),
  'generate | rest, 4 pieces': split(ACT, pieces=4),
  'generate ref_logp | rest, 4 pieces': split(
    (*ACT, 'reward', 'measure', 'group_advantage', 'ref_logp'), pieces=4
  ),
  'ref_logp | rest': split(('ref_logp',)),
  'ref_logp | rest, 4 pieces': split(('ref_logp',), pieces=4),
  'gradient | rest, 4 pieces, 8 rows': split(
    ('gradient', 'apply'), pieces=4, micro_batch={'gradient': 8}
  ),
  'generate | rest, 8 pieces': split(ACT, pieces=8),
}


def kendall(pairs) -> float:
  """Kendall's τ of `(predicted, measured)`; near ties do not count."""
  agree, there = 0, 0
  for (p, m), (q, n) in itertools.combinations(pairs, 2):
    if max(m, n) > DIFFERENT * min(m, n):
      there += 1
      agree += 1 if (p - q) * (m - n) > 0 else -1
  return agree / there


def main():
  setting = setting_lib.setting()
  runs, rows = {}, []
  for name, sketch in SKETCHES.items():
    plan = plan_lib.parse(sketch, setting.flow.stages)
    predicted = autoplan.predict_step(setting.flow, 0, setting.model, plan).step
    cost = cost_table.CostTable(setting.model, plan)
    plan = passes.with_order(setting.flow, plan, cost)
    runs[name] = predicted, local.LocalRuntime(plan, step=setting.flow)
  first = state_readers.FirstState(lambda: setting.state)
  seconds = {name: [] for name in runs}
  for turn in range(ROUNDS):  # In alternation: noise comes in spells.
    for name, (_, runtime) in runs.items():
      runtime.start(first)
      for i in range(STEPS + WARM * (not turn)):
        start = time.perf_counter()
        runtime.step(setting.batch, jax.random.key(i))
        if turn or i >= WARM:
          seconds[name].append(time.perf_counter() - start)
  for name, (predicted, runtime) in runs.items():
    rows.append((name, predicted, statistics.median(seconds[name])))
    runtime.close()
  report(rows)


def report(rows):
  print(f'{"plan":36} predicted  measured  ratio')
  for name, predicted, measured in rows:
    ratio = measured / predicted
    print(f'{name:36} {predicted:7.3f} s  {measured:6.3f} s  {ratio:.2f}')
  best = min(measured for *_, measured in rows)
  first = min(rows, key=lambda row: row[1])
  summary = {
    'kendall_tau': kendall([row[1:] for row in rows]),
    'regret': first[2] / best - 1,
    'plans': rows,
  }
  print(
    f'Kendall τ {summary["kendall_tau"]:.2f}, regret {summary["regret"]:.1%}'
  )
  print(json.dumps(summary))


if __name__ == '__main__':
  main()
