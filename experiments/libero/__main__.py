"""Records a scripted controller at LIBERO's cream-cheese task.

python -m experiments.libero experiments/libero/basket.gif
"""

import pathlib
import sys

import jax
import numpy as np

from rlinf_jax.envs import libero
from rlinf_jax.prepare import libero_script
from rlinf_jax.report import video
from stages import metrics
from stages.envs import demonstrations
from stages.envs.rollouts import evaluate as evaluate_lib
from stages.envs.rollouts import video as video_lib


def main(path: str):
  """Writes a video of the benchmark's first initial states."""
  env = libero.env(
    'libero_object',
    video_lib.EPISODES,
    2,
    task_ids=(1,),
    horizon=100,
    step_timeout=300.0,
  )
  policy = demonstrations.scripted_policy(env, libero_script.to_basket, 0.0)
  seed_B = np.arange(video_lib.EPISODES, dtype=np.int32)
  evaluate = evaluate_lib.evaluator(policy, env)
  info = jax.device_get(evaluate((), (), seed_B, jax.random.key(0)))
  numbers, rows = metrics.read(info)
  video.write(pathlib.Path(path), rows[video_lib.NAME])
  print(f'{100 * numbers["eval/success_once"]:.0f} % succeeded: {path}')


if __name__ == '__main__':
  main(*sys.argv[1:])
