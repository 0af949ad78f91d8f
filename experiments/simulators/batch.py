"""Seconds of a simulator step by the number of environments.

  python -m experiments.simulators.batch

ManiSkill's PushCube in one process and in two; cases take turns, and the median
step of each is printed. The paper has this figure for its own simulators.
"""

import json
import statistics
import time

import numpy as np

from rlinf_jax.envs import env_pool, maniskill

TASK = 'PushCube-v1'
SIZES = 1, 4, 16, 32
TURNS, CALLS = 6, 20


def main():
  """Prints a table and a line of JSON."""
  pools = {
    (n, P): env_pool.make_pool(maniskill.make, n, P, task=TASK)
    for P in (1, 2)
    for n in SIZES
    if n >= P
  }
  random = np.random.default_rng(0)
  tokens = {case: pool.init(range(case[0]))[0] for case, pool in pools.items()}
  took = {case: [] for case in pools}
  for turn in range(TURNS + 1):
    for case, pool in pools.items():
      shape = CALLS, case[0], *pool.spec.low.shape
      for action in random.uniform(-1, 1, shape).astype(np.float32):
        start = time.perf_counter()
        tokens[case], _ = pool.step(tokens[case], action)
        if turn:
          took[case].append(time.perf_counter() - start)
  rows = [(*case, statistics.median(some)) for case, some in took.items()]
  print('environments  processes  milliseconds  steps a second')
  for n, P, seconds in rows:
    print(f'{n:12}  {P:9}  {1e3 * seconds:12.2f}  {n / seconds:14.0f}')
  print(json.dumps(rows))


if __name__ == '__main__':
  main()
