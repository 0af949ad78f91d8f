"""Pictures of ManiSkill: whether there are any, and what they cost.

Worker processes import this module, so it imports no JAX.
"""

import contextlib
import functools
from typing import Any

import numpy as np

VIDEO_SIZE = 160  # Pixels along each edge of a frame for people.


@functools.cache
def no_rendering() -> str:
  """Why nothing can be rendered here; '' if it can."""
  import sapien

  try:
    sapien.render.RenderMaterial()
  except RuntimeError as error:
    # Tasks by state create materials, too.
    sapien.render.RenderMaterial = NullMaterial
    sapien.pysapien.render.RenderMaterial = NullMaterial
    return (
      f"ManiSkill's images need a Vulkan device ({error}): install the "
      "driver of a GPU, or Mesa 25's for processors (`mesa-vulkan-drivers`; "
      'VK_ICD_FILENAMES says where its `lvp_icd` is, if it is not found)'
    )
  return ''


def settings(draws: bool, size: int) -> dict[str, Any]:
  """The arguments of ManiSkill's environments that say how they are drawn.

  Args:
    draws: whether they are drawn at all.
    size: of observed images, in pixels along each edge.
  """
  if not draws:
    return {'render_backend': 'none'}
  # Without a GPU, ManiSkill renders by a software Vulkan device.
  return {
    'render_backend': 'gpu',
    'sensor_configs': {'width': size, 'height': size},
    'human_render_camera_configs': {'width': VIDEO_SIZE, 'height': VIDEO_SIZE},
  }


class NullMaterial:
  """Replaces a surface material where nothing is rendered."""

  def __init__(self, *args, **kwargs):
    """Takes any arguments."""

  def __setattr__(self, name, value):
    """Ignores the value."""

  def __getattr__(self, name):
    return lambda *args, **kwargs: None


@contextlib.contextmanager
def no_pictures(env):
  """A context in which steps of a ManiSkill environment draw no picture."""
  env._get_obs_sensor_data = lambda *args, **kwargs: {}
  try:
    yield
  finally:
    del env._get_obs_sensor_data  # That of the class is found again.


def draw_collision_shapes(env):
  """Draws links by their collision shapes from now on, in new scenes, too.

  Args:
    env: ManiSkill's, of one scene. Links whose collision shapes are not all
      meshes, such as fingers, keep their looks.
  """
  own = env._after_reconfigure

  def after(options):
    own(options)
    _simplify(env.agent.robot)

  env._after_reconfigure = after
  _simplify(env.agent.robot)


def _simplify(robot):
  """Replaces looks of links by their collision meshes."""
  import sapien

  for link in robot.links:
    (part,) = link._objs
    shapes = part.collision_shapes
    looks = part.entity.find_component_by_type(
      sapien.render.RenderBodyComponent
    )
    meshes = (sapien.physx.PhysxCollisionShapeConvexMesh,)
    if looks is None or not shapes:
      continue
    if not all(isinstance(shape, meshes) for shape in shapes):
      continue
    body = sapien.render.RenderBodyComponent()
    for shape in shapes:
      body.attach(_faceted(shape, _material(looks)))
    looks.visibility = 0.0
    part.entity.add_component(body)


def _material(looks):
  """The material of most corners of a body."""
  parts = [part for shape in looks.render_shapes for part in shape.parts]
  return max(parts, key=lambda part: len(part.vertices)).material


def _faceted(shape, material):
  """A convex collision mesh as flat faces."""
  import sapien

  corner_FTX = (shape.vertices * shape.scale)[shape.triangles]
  sides = np.diff(corner_FTX, axis=1)
  normal_FX = np.cross(sides[:, 0], sides[:, 1])
  normal_FX /= np.linalg.norm(normal_FX, axis=1, keepdims=True).clip(1e-12)
  corner_VX = corner_FTX.reshape(-1, 3).astype(np.float32)
  made = sapien.render.RenderShapeTriangleMesh(
    corner_VX,
    np.arange(len(corner_VX), dtype=np.uint32).reshape(-1, 3),
    np.repeat(normal_FX, 3, 0).astype(np.float32),
    np.zeros((len(corner_VX), 2), np.float32),
    material,
  )
  made.local_pose = shape.local_pose
  return made
