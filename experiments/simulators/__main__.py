"""How much of bare simulators' speed a pool keeps, on this machine.

  python -m experiments.simulators --task PushCube-v1 --n 16 --processes 2

Bare simulators are as many processes, each a plain loop over its share of the
environments that waits for nobody. Both do the same actions, resets included,
and take turns.
"""

import json
import statistics
import time

from absl import app, flags
import numpy as np

from experiments.simulators import bare as bare_lib
from rlinf_jax.worlds import hosted, maniskill

TASK = flags.DEFINE_string('task', 'PushCube-v1', 'Which of ManiSkill.')
N = flags.DEFINE_integer('n', 16, 'Environments.')
PROCESSES = flags.DEFINE_integer('processes', 2, 'To spread them over.')
CALLS = flags.DEFINE_integer('calls', 100, 'Steps of each in a turn.')
TURNS = flags.DEFINE_integer('turns', 9, 'Of each kind.')
HALVES = flags.DEFINE_bool('halves', False, 'Two halves of the rows in turn.')


def main(_):
  """Prints a line of JSON."""
  n, P = N.value, PROCESSES.value
  pool = hosted.pool(maniskill.make, n, P, task=TASK.value)
  shape = CALLS.value, n, *pool.spec.low.shape
  action = np.random.default_rng(0).uniform(-1, 1, shape).astype(np.float32)
  bare = bare_lib.Bare(TASK.value, action, P)
  spent = {'bare': [], 'pool': []}
  token, _ = pool.init(np.arange(n))
  for _ in range(TURNS.value + 1):
    spent['bare'].append(bare.run())
    begin = time.perf_counter()
    token = run(pool, token, action)
    spent['pool'].append(time.perf_counter() - begin)
  steps = CALLS.value * n
  spent = {name: seconds[1:] for name, seconds in spent.items()}  # Warm.
  ratio = [b / p for b, p in zip(*spent.values(), strict=True)]
  said = {name: steps / statistics.median(x) for name, x in spent.items()}
  said |= {'ratio': statistics.median(ratio), 'ratios': sorted(ratio)}
  about = {'task': TASK.value, 'n': n, 'processes': P, 'halves': HALVES.value}
  print(json.dumps(about | said))


def run(pool, token, action):
  """The same actions, once through."""
  if not HALVES.value:
    for action_NA in action:
      token, _ = pool.step(token, action_NA)
    return token
  # One half is stepped while whoever acts has the other.
  h = len(pool) // 2
  rows = slice(0, h), slice(h, None)
  tokens = [token[r] for r in rows]
  sent = [pool.send(t, action[0][r]) for t, r in zip(tokens, rows, strict=True)]
  for action_NA in action[1:]:
    for k, r in enumerate(rows):
      tokens[k], _ = pool.receive(sent[k])
      sent[k] = pool.send(tokens[k], action_NA[r])
  return np.concatenate([pool.receive(one)[0] for one in sent])


if __name__ == '__main__':
  app.run(main)
