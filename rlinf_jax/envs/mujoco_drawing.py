"""MuJoCo's renderer, as LIBERO and Meta-World use it.

Worker processes import this module, so it imports no JAX.
"""

import os

from rlinf_jax.envs import simulator


def renderer(model, size: int, *, fast: bool):
  """A renderer of pictures of size × size pixels.

  Args:
    model: the scene, a `mujoco.MjModel`. If `fast`, it gets a map of shadows of
      one pixel, as its own, of 4096 × 4096, takes memory without being drawn.
    size: the edge of pictures, in pixels.
    fast: whether to leave out shadows and reflections.

  Raises:
    UnavailableError: if MuJoCo cannot draw on this machine.
  """
  import mujoco

  if fast:
    model.vis.quality.shadowsize = 1
  try:
    made = mujoco.Renderer(model, size, size)
  except Exception as error:  # noqa: BLE001 EGL or OSMesa is missing.
    chosen = os.environ.get('MUJOCO_GL', 'unset')
    raise simulator.UnavailableError(
      f'MuJoCo cannot render here with MUJOCO_GL={chosen} ({error}): install '
      'libegl1 and Mesa for MUJOCO_GL=egl, or libosmesa6 for MUJOCO_GL=osmesa, '
      'and set it before MuJoCo is imported.'
    ) from None
  if fast:
    leave_out_shadows(made.scene)
  return made


def leave_out_shadows(scene):
  """Turns shadows and reflections of a `mujoco.MjvScene` off."""
  import mujoco

  for flag in (
    mujoco.mjtRndFlag.mjRND_SHADOW,
    mujoco.mjtRndFlag.mjRND_REFLECTION,
  ):
    scene.flags[flag] = 0
