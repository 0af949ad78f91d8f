"""Counts how often a script puts the object on the plate, or records it.

python -m experiments.maniskill.plate
python -m experiments.maniskill.plate --kinds train --pictures 128 --out DATA

Episodes have the seeds 0, 1, …
"""

import argparse
import functools

from rlinf_jax.envs import maniskill
from rlinf_jax.envs.put_on_plate import kinds
from rlinf_jax.prepare import plate_script
from stages.envs import demonstrations


def main(args: argparse.Namespace):
  """Runs the script, and says how often it succeeds."""
  env = functools.partial(
    maniskill.env,
    kinds.TASK,
    args.num_envs,
    args.num_processes,
    kinds=args.kinds,
    num_distractors=args.distractors,
    control_mode='pd_ee_delta_pose',
    reward_mode='sparse',
  )
  state_env, shown = env(), None
  if args.pictures:
    shown = env(images=True, image_size=args.pictures)
  data, succeeded = demonstrations.collect(
    shown or state_env,
    plate_script.to_plate,
    num_envs=args.num_envs,
    noise_std=args.noise_std,
    num_episodes=args.num_episodes,
    controller_env=state_env if shown else None,
  )
  print(
    f'{succeeded} of {args.num_episodes} episodes succeeded, in '
    f'{len(data.action) / max(succeeded, 1):.1f} steps on average.'
  )
  if args.out:
    demonstrations.write(args.out, data)


def parser() -> argparse.ArgumentParser:
  """The command line."""
  made = argparse.ArgumentParser(description=__doc__.split('\n', 1)[0])
  made.add_argument('--num_episodes', type=int, default=50)
  made.add_argument('--num_envs', type=int, default=10)
  made.add_argument('--num_processes', type=int, default=2)
  made.add_argument('--kinds', choices=kinds.SETS, default='all')
  made.add_argument('--distractors', type=int, default=1)
  made.add_argument('--noise_std', type=float, default=0.0)
  made.add_argument('--pictures', type=int, help='edge, in pixels')
  made.add_argument('--out', help='a file of demonstrations, .npz')
  return made


if __name__ == '__main__':
  main(parser().parse_args())
