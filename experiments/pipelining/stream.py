"""Stages of known duration on two places: pieces against a barrier.

  python -m experiments.pipelining.stream [--ray]

Generation with a long tail and a learner whose sums add up, each asleep for as
long as it is said to take, so that two places overlap on any machine. Prints
what the planner's simulation predicts and what the runtime then takes.
"""

import argparse
import functools
import json
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from planner.ir import cost
from planner.ir import flow as flow_lib
from planner.ir import plan as plan_lib
from planner.lower import passes
from planner.simulation import simulate
from rlinf_jax.runtime import local
from rlinf_jax.state import state_readers
import stages

ROWS, STEPS = 64, 12
# Seconds that groups of eight rows are decoded for: most end early, one late.
TAIL = np.array([3, 3, 4, 4, 5, 6, 8, 15]) / 100
LEARN = TAIL.sum()
APPLY = 0.02


class Known(cost.UnitCost):
  """The durations that the stages have."""

  def seconds(self, flow, node, place):
    del flow, place
    piece, pieces = node.piece
    if node.name == 'act':
      return float(np.split(TAIL, pieces)[piece].sum())
    return {'learn': LEARN / pieces, 'apply': APPLY}.get(node.name, 0.0)


def step(w, batch, key):
  """One step: act, learn from it, apply."""
  del key
  return apply(w, learn(act(w, batch))), ()


def _act(w, row_B):
  groups = row_B[::8] // 8  # Rows are numbered: which groups are these?
  time.sleep(float(TAIL[groups].sum()))
  return row_B.astype(np.float32) + w


def _learn(x_B):
  time.sleep(LEARN * len(x_B) / ROWS)
  return x_B.sum()


def _apply(w, total):
  time.sleep(APPLY)
  return np.float32(w + total / ROWS**2)


def _like(x):
  return jax.ShapeDtypeStruct(x.shape, jnp.float32)


act = stages.Stage(
  _act, 'act', unbatched=(0,), host=True, out_shapes=lambda w, x: _like(x)
)
learn = stages.Stage(
  _learn,
  'learn',
  'sum',
  host=True,
  out_shapes=lambda x: jax.ShapeDtypeStruct((), jnp.float32),
)
apply = stages.Stage(
  _apply, 'apply', 'batch', host=True, out_shapes=lambda w, g: _like(w)
)


STATE, BATCH = np.zeros((), np.float32), np.arange(ROWS, dtype=np.int32)


def flow():
  """The flow of a step."""
  return flow_lib.trace(step, jnp.asarray(STATE), BATCH, jax.random.key(0))


def flows():
  """The same, and of an evaluation that does nothing: recorded anywhere."""
  nothing = lambda w, batch, key: (w, ())
  args = jnp.asarray(STATE), BATCH, jax.random.key(0)
  return flow(), flow_lib.trace(nothing, *args)


def measure(pieces: int, far: bool) -> dict[str, float]:
  """Seconds a step in so many pieces: simulated, and taken."""
  made, evaluate = flows()
  plan = plan_lib.parse(
    {
      'places': {'actor': {'devices': [0]}, 'learner': {'devices': [1]}},
      'stages': {'act': 'actor', '*': 'learner'},
      'pieces': pieces,
    },
    made.stages,
  )
  cut, programs = passes.lower(made, plan, Known())
  plan = passes.with_order(made, plan, Known())
  if far:
    from rlinf_jax.runtime.ray import driver

    runtime = driver.RayRuntime(plan, flows, step=made, evaluate=evaluate)
  else:
    runtime = local.LocalRuntime(plan, step=made)
  make = functools.partial(jnp.asarray, STATE)
  runtime.start(state_readers.FirstState(make))
  taken = []
  for i in range(STEPS):
    start = time.perf_counter()
    runtime.step(BATCH, jax.random.key(i))
    taken.append(time.perf_counter() - start)
  runtime.close()
  return {
    'pieces': pieces,
    'simulated': simulate.simulate(cut, programs, Known()).period,
    'measured': statistics.median(taken[2:]),
  }


def main():
  parser = argparse.ArgumentParser()
  parser.add_argument('--ray', action='store_true', help='a process a place')
  far = parser.parse_args().ray
  if far:
    from rlinf_jax.runtime.ray import connection

    connection.connect()
  jax.config.update('jax_num_cpu_devices', 2)
  rows = [measure(pieces, far) for pieces in (1, 2, 4, 8)]
  print('pieces  simulated  measured  against the barrier')
  for row in rows:
    gain = rows[0]['measured'] / row['measured']
    print(
      f'{row["pieces"]:6}  {row["simulated"]:7.3f} s  {row["measured"]:6.3f} s'
      f'  {gain:.2f} ×'
    )
  print(json.dumps(rows))


if __name__ == '__main__':
  # As Ray's processes know it: they cannot see the main program.
  from experiments.pipelining import stream

  stream.main()
