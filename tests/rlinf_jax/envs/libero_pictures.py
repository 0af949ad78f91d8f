"""Compares pictures of LIBERO with those of its own environment, by bits."""

import pathlib
import sys

import numpy as np

from rlinf_jax.envs import libero, libero_files

SUITE, TASK, PIXELS = 'libero_object', 1, 48


def main():
  env = libero.make(
    0,
    SUITE,
    task_ids=(TASK,),
    image_size=PIXELS,
    cameras=('wrist',),
    fast_rendering=False,
  )
  own = own_environment()
  for seed in (0, 2):
    env.reset(seed)
    np.random.seed(seed)
    libero.reset_scene(own)
    own.set_init_state(env._states[seed])
    for _ in range(libero.SETTLE_STEPS):
      own.step(libero.HOLD)
  drawn = 0
  for t, action_A in enumerate(np.random.default_rng(0).uniform(-1, 1, (6, 7))):
    want, *_ = own.step(action_A)
    if t % 3 < 2:
      assert env.advance(action_A).obs is None
      continue
    obs = env.step(action_A).obs
    image = want['robot0_eye_in_hand_image'][::-1]
    np.testing.assert_array_equal(obs['image']['wrist'], image)
    np.testing.assert_array_equal(
      obs['state'], want['robot0_proprio-state'].astype(np.float32)
    )
    drawn += image.std() > 10
  assert drawn == 2
  assert 'torch' not in sys.modules  # It takes a CPU-second, and 200 MB.
  env.close()
  own.close()


def own_environment():
  """LIBERO's own environment of the task, which observes its camera."""
  import libero.libero as package
  from libero.libero import envs

  scenes = pathlib.Path(package.__file__).parent / 'bddl_files' / SUITE
  return envs.env_wrapper.ControlEnv(
    str(scenes / f'{libero_files.tasks(SUITE)[TASK]}.bddl'),
    camera_names=['robot0_eye_in_hand'],
    camera_heights=PIXELS,
    camera_widths=PIXELS,
    ignore_done=True,
    hard_reset=False,
  )


if __name__ == '__main__':
  main()
