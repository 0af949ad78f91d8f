"""Stages at rows that were not measured, and what they need in memory.

  python -m experiments.prediction.stages

Each stage that matters is measured at three numbers of rows, in CPU-seconds,
and predicted at others. Memory is predicted before a stage is compiled and
held against what its compiler then says.
"""

import json
import os
import statistics
import time

os.environ['XLA_FLAGS'] = '--xla_cpu_multi_thread_eigen=false'

from experiments.prediction import setting as setting_lib
from planner.costs import measured as measured_lib
from planner.costs.mesh import call_memory
from planner.ir import plan as plan_lib
from rlinf_jax.planning.profiling import call_timing
from rlinf_jax.planning.profiling import stage_profile as profile

STAGES = ('generate', 'ref_logp', 'gradient')
ROWS = (8, 16, 32, 64, 128)
CALIBRATED = (8, 32, 128)


def main():
  setting = setting_lib.setting()
  bench = profile.Bench(
    setting.flow,
    setting_lib.start_values(setting.flow, setting.state, setting.batch).read,
    setting.bare,
  )
  times, sizes = [], []
  for node in setting.flow.nodes:
    bench.fetch(node)
    if node.name in STAGES:
      cases = [bench.calls(node, rows) for rows in ROWS]
      seconds = call_timing.seconds(cases, time.process_time)
      spent = dict(zip(ROWS, seconds, strict=True))
      curve = measured_lib.RowCurve(tuple((n, spent[n]) for n in CALIBRATED))
      times += [
        (node.name, n, curve.at(n), spent[n])
        for n in ROWS
        if n not in CALIBRATED
      ]
      sizes += [
        (node.name, n, *bytes_of(setting, bench, node, n)) for n in ROWS
      ]
    bench.make(node)
  table('CPU-seconds at rows that were not measured', times, 1)
  table('MiB, before and after compiling', sizes, 2**20)


def bytes_of(setting, bench, node, rows):
  """Of a call, predicted and as compiled: what comes, goes and is between."""
  flow = profile.resized(setting.flow, node, rows)
  inside = call_memory.within(
    flow,
    node,
    (),
    plan_lib.Execution(),
    1,
    setting.bare.works,
    setting.bare.layout,
  )
  values = {*node.reads, *node.writes}
  outside = sum(flow.values[v].bytes for v in values)
  predicted = outside + sum(part.value for part in inside.values())
  analysis = bench.places[0].compile(flow, node).memory_analysis()
  there = (
    analysis.argument_size_in_bytes
    + analysis.output_size_in_bytes
    + analysis.temp_size_in_bytes
    - analysis.alias_size_in_bytes
  )
  return predicted, there


def table(title, rows, unit):
  print(title)
  for name, n, predicted, there in rows:
    print(
      f'  {name:10} {n:4} rows  predicted {predicted / unit:9.4g}  '
      f'found {there / unit:9.4g}  {predicted / there - 1:+.1%}'
    )
  errors = [abs(p / t - 1) for *_, p, t in rows]
  print(f'  median error {statistics.median(errors):.1%}')
  print(json.dumps({'what': title, 'errors': errors}))


if __name__ == '__main__':
  main()
