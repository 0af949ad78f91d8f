"""CPU time of a step of LIBERO by what is drawn of it.

python -m experiments.simulators.drawing
"""

import json
import statistics
import time

from absl import app, flags
import numpy as np

from rlinf_jax.envs import libero, simulator

PIXELS = flags.DEFINE_integer('pixels', 224, 'Edge of a picture.')
STEPS = flags.DEFINE_integer('steps', 32, 'Steps of a case in a turn.')
TURNS = flags.DEFINE_integer('turns', 3, 'Turns of each case.')
# Cameras, and actions of a chunk.
CASES = (((), 1), (('front',), 1), (('front',), 8), (('front', 'wrist'), 1))
CASES += ((('front', 'wrist'), 8),)


def main(_):
  """Prints a line of JSON for each case, and the ratios by cameras."""
  seconds = {case: [] for case in CASES}
  for _ in range(TURNS.value):
    for cameras, chunk in CASES:
      seconds[cameras, chunk].append(of_a_step(cameras, chunk))
  median = {case: statistics.median(found) for case, found in seconds.items()}
  for (cameras, chunk), found in median.items():
    line = {'cameras': cameras, 'chunk': chunk, 'ms of a step': 1e3 * found}
    print(json.dumps(line))
  less = [
    f'{median[cameras, 1] / median[cameras, 8]:.1f}'
    for cameras in (('front',), ('front', 'wrist'))
  ]
  print(f'figure: {" and ".join(less)} times less')


def of_a_step(cameras: tuple[str, ...], chunk: int) -> float:
  """CPU-seconds of a step, of `chunk` of which the last one is observed."""
  env = libero.make(
    0, 'libero_object', task_ids=(1,), cameras=cameras, image_size=PIXELS.value
  )
  env.reset(0)
  action_A = np.zeros(7)
  begin = time.process_time()
  for t in range(STEPS.value):
    if (t + 1) % chunk:
      simulator.advance(env, action_A)
    else:
      env.step(action_A)
  found = (time.process_time() - begin) / STEPS.value
  env.close()
  return found


if __name__ == '__main__':
  app.run(main)
