"""The task for ManiSkill: importing this module registers it there."""

from collections.abc import Sequence
import functools
from typing import Any

from mani_skill.agents import robots
from mani_skill.envs import sapien_env
from mani_skill.sensors import camera
from mani_skill.utils import registration, sapien_utils
from mani_skill.utils.scene_builder import table
from mani_skill.utils.structs import actor, pose, types
import numpy as np
import sapien
import torch

from rlinf_jax.envs.put_on_plate import kinds as kinds_lib
from rlinf_jax.envs.put_on_plate import placement

HORIZON = 80  # Steps of an episode, at ten a second.
RIM_HEIGHT, RIM_WIDTH, RIM_PARTS = 0.014, 0.006, 24  # Of the plate, in meters.
PLATE_COLOR = (0.93, 0.93, 0.90)
HELD_STEPS = 5  # Steps in a row that count as holding the object.
CONTACT = 0.03  # Newton, at least, with which an object rests on the plate.


@registration.register_env(kinds_lib.TASK, max_episode_steps=HORIZON)
class PutOnPlate(sapien_env.BaseEnv):
  """Puts the object that the instruction names on the plate.

  An episode's seed gives the kind of the object, and where it, the plate and
  the distractors are.

  Success, which ends an episode: the center of the object is within the rim of
  the plate and not higher than its size explains, the plate touches it with
  more than `CONTACT`, the hand does not hold it, and no joint of the arm is
  faster than 0.2 rad/s.

  Rewards, by `reward_mode`:
    'sparse': 1 for success.
    'staged': what a step adds to a sum of 0.1 for a grasp, 0.1 for one of five
      steps in a row, both at any time in the episode, and 1 for success after a
      grasp, as in RLinf's scene.
    'dense': of reaching, grasping, carrying and letting go; at most 5.
    'normalized_dense': a fifth of it.
  """

  SUPPORTED_ROBOTS = ['panda', 'panda_wristcam']
  SUPPORTED_REWARD_MODES = (
    'sparse',
    'staged',
    'dense',
    'normalized_dense',
    'none',
  )
  agent: robots.Panda | robots.PandaWristCam

  def __init__(
    self,
    *args,
    kinds: str | Sequence[str] | None = None,
    num_distractors: int = 0,
    robot_uids: str = 'panda',
    robot_init_qpos_noise: float = 0.02,
    num_envs: int = 1,
    reconfiguration_freq: int | None = None,
    **kwargs,
  ):
    """Builds the scene.

    Args:
      *args: of ManiSkill's environments.
      kinds: of the object and of distractors, see `kinds.named`.
      num_distractors: objects of other kinds that lie on the table, too; at
        most four.
      robot_uids: 'panda', or 'panda_wristcam' for a second camera.
      robot_init_qpos_noise: standard deviation of the arm's first joint angles.
      num_envs: scenes, of which several need a GPU.
      reconfiguration_freq: episodes between new scenes, 0 for none; None for
        each, where there is one scene. Of several, each keeps its objects.
      **kwargs: of ManiSkill's environments.

    Raises:
      ValueError: for kinds that are not there, or too many distractors.
    """
    self.kinds = kinds_lib.named(kinds)
    placement.check_distractors(num_distractors, len(self.kinds))
    self._num_distractors = num_distractors
    self._qpos_noise = robot_init_qpos_noise
    if reconfiguration_freq is None:
      reconfiguration_freq = int(num_envs == 1)
    super().__init__(
      *args,
      robot_uids=robot_uids,
      num_envs=num_envs,
      reconfiguration_freq=reconfiguration_freq,
      **kwargs,
    )

  def get_language_instruction(self, **kwargs) -> list[str]:
    """The instruction of each scene."""
    del kwargs  # Of ManiSkill's other tasks with instructions.
    return [kinds_lib.instruction(kind[0]) for kind in self._kinds]

  @property
  def _default_sim_config(self):
    return types.SimConfig(sim_freq=100, control_freq=10)

  @property
  def _default_sensor_configs(self):
    view = sapien_utils.look_at(eye=[0.42, 0.0, 0.42], target=[-0.08, 0.0, 0.0])
    return [camera.CameraConfig('base_camera', view, 128, 128, 0.9, 0.01, 100)]

  @property
  def _default_human_render_camera_configs(self):
    view = sapien_utils.look_at(eye=[0.5, 0.45, 0.45], target=[-0.05, 0, 0.05])
    return camera.CameraConfig('render_camera', view, 512, 512, 0.9, 0.01, 100)

  def _load_agent(self, options: dict):
    super()._load_agent(options, sapien.Pose(p=[-0.615, 0, 0]))

  def _load_scene(self, options: dict):
    del options
    self._table = table.TableSceneBuilder(
      self, robot_init_qpos_noise=self._qpos_noise
    )
    self._table.build()
    self.plate = _plate(self.scene)
    self._kinds = [self._kinds_of(int(seed)) for seed in self._episode_seed]
    self._objects = [self._merged(j) for j in range(1 + self._num_distractors)]
    sizes = [[kinds_lib.half_size(x) for x in kinds] for kinds in self._kinds]
    self._half_sizes = torch.tensor(sizes, device=self.device)
    self._half_size = self._half_sizes[:, 0]
    zeros = functools.partial(torch.zeros, self.num_envs, device=self.device)
    self._counted, self._held = (zeros(dtype=torch.int32) for _ in range(2))
    self._grasped, self._kept = (zeros(dtype=torch.bool) for _ in range(2))
    self._potential = zeros()

  def _kinds_of(self, seed: int) -> list[str]:
    """Kinds of the object and of distractors in an episode."""
    number = kinds_lib.number_of_episode(seed, len(self.kinds))
    others = np.delete(np.arange(len(self.kinds)), number)
    drawn = np.random.default_rng([seed, 0]).permutation(others)
    drawn = drawn[: self._num_distractors]
    return [self.kinds[i] for i in (number, *drawn)]

  def _merged(self, j: int):
    """The j-th object of each scene, as ManiSkill steps them together."""
    made = []
    for i, kind in enumerate(self._kinds):
      builder = _object_builder(self.scene, kind[j])
      builder.set_scene_idxs([i])
      builder.set_initial_pose(sapien.Pose([0.3 * j, 0.5, 0.1]))
      made.append(builder.build(name=f'object{j}-{i}'))
      self.remove_from_state_dict_registry(made[-1])
    merged = actor.Actor.merge(made, name=f'object{j}')
    self.add_to_state_dict_registry(merged)
    return merged

  def _initialize_episode(self, env_idx: torch.Tensor, options: dict):
    del options
    with torch.device(self.device):
      self._table.initialize(env_idx)
      places = [
        placement.draw(int(self._episode_seed[i]), len(self._objects))
        for i in env_idx
      ]
      place = torch.tensor(np.stack(places), dtype=torch.float32)
      self.plate.set_pose(pose.Pose.create_from_pq(_at(place[:, 0], 0.0)))
      for j, thing in enumerate(self._objects, 1):
        yaw = place[:, j, 2] / 2
        q = torch.zeros((len(env_idx), 4))
        q[:, 0], q[:, 3] = torch.cos(yaw), torch.sin(yaw)
        p = _at(place[:, j], self._half_sizes[env_idx, j - 1, 2])
        thing.set_pose(pose.Pose.create_from_pq(p, q))
    self._counted[env_idx] = self._held[env_idx] = 0
    self._grasped[env_idx] = self._kept[env_idx] = False
    self._potential[env_idx] = 0.0

  def evaluate(self) -> dict[str, torch.Tensor]:
    thing = self._objects[0]
    is_grasped = self.agent.is_grasping(thing)
    self._count(is_grasped)
    offset = thing.pose.p - self.plate.pose.p
    force = self.scene.get_pairwise_contact_forces(thing, self.plate)
    is_on_plate = (
      (
        torch.linalg.norm(offset[:, :2], axis=1)
        <= kinds_lib.PLATE_RADIUS - RIM_WIDTH
      )
      & (
        offset[:, 2]
        <= kinds_lib.PLATE_FLOOR + self._half_size.max(1).values + 0.01
      )
      & (torch.linalg.norm(force, axis=1) > CONTACT)
    )
    is_robot_static = self.agent.is_static(0.2)
    return {
      'is_grasped': is_grasped,
      'is_on_plate': is_on_plate,
      'is_robot_static': is_robot_static,
      'success': is_on_plate & ~is_grasped & is_robot_static,
    }

  def _count(self, is_grasped: torch.Tensor):
    """Counts steps with a grasp, of each step once."""
    now = self._elapsed_steps.to(self._counted)
    held = torch.where(is_grasped, self._held + 1, 0)
    self._held = torch.where(now > self._counted, held, self._held)
    self._counted = now.clone()
    self._grasped |= self._held >= 1
    self._kept |= self._held >= HELD_STEPS

  def _get_obs_extra(self, info: dict) -> dict[str, torch.Tensor]:
    obs = {'tcp_pose': self.agent.tcp_pose.raw_pose}
    if 'state' in self.obs_mode:
      thing = self._objects[0].pose
      obs |= {
        'is_grasped': info['is_grasped'],
        'object_pose': thing.raw_pose,
        'object_half_size': self._half_size,
        'plate_position': self.plate.pose.p,
        'tcp_to_object': thing.p - self.agent.tcp_pose.p,
        'object_to_plate': self.plate.pose.p - thing.p,
      }
      if others := self._objects[1:]:
        obs['distractor_pose'] = torch.cat([x.pose.raw_pose for x in others], 1)
    return obs

  def get_reward(self, obs: Any, action: torch.Tensor, info: dict):
    if self._reward_mode == 'staged':
      return self._staged_reward(info)
    return super().get_reward(obs=obs, action=action, info=info)

  def _staged_reward(self, info: dict) -> torch.Tensor:
    potential = (
      0.1 * self._grasped
      + 0.1 * self._kept
      + 1.0 * (info['success'] & self._grasped)
    )
    reward = potential - self._potential
    self._potential = potential
    return reward

  def compute_dense_reward(self, obs: Any, action: torch.Tensor, info: dict):
    del obs, action
    thing, tcp = self._objects[0].pose.p, self.agent.tcp_pose.p
    near = lambda x, y: 1 - torch.tanh(5 * torch.linalg.norm(x - y, axis=1))
    above = self.plate.pose.p.clone()
    above[:, 2] += kinds_lib.PLATE_FLOOR + self._half_size[:, 2]
    grasped, placed = info['is_grasped'], info['is_on_plate']
    reward = near(tcp, thing) + grasped + near(thing, above) * grasped
    speed = torch.linalg.norm(self.agent.robot.get_qvel()[..., :-2], axis=1)
    still = 1 - torch.tanh(5 * speed)
    let_go = (~grasped).float()
    reward = torch.where(placed, 3 + let_go + still, reward)
    return torch.where(info['success'], 5.0, reward)

  def compute_normalized_dense_reward(
    self, obs: Any, action: torch.Tensor, info: dict
  ):
    return self.compute_dense_reward(obs=obs, action=action, info=info) / 5


def _at(place_B3: torch.Tensor, height) -> torch.Tensor:
  """Positions on the table, at a height."""
  p = place_B3.clone()
  p[:, 2] = height
  return p


def _plate(scene):
  """A disc with a rim of boxes around it."""
  builder = scene.create_actor_builder()
  material = sapien.render.RenderMaterial(base_color=[*PLATE_COLOR, 1])
  upright = sapien.Pose(
    [0, 0, kinds_lib.PLATE_FLOOR / 2], [0.7071068, 0, 0.7071068, 0]
  )
  disc = {
    'radius': kinds_lib.PLATE_RADIUS,
    'half_length': kinds_lib.PLATE_FLOOR / 2,
  }
  builder.add_cylinder_collision(upright, **disc)
  builder.add_cylinder_visual(upright, **disc, material=material)
  side = kinds_lib.PLATE_RADIUS * np.tan(np.pi / RIM_PARTS)
  half = [RIM_WIDTH / 2, side, RIM_HEIGHT / 2]
  for angle in np.arange(RIM_PARTS) * 2 * np.pi / RIM_PARTS:
    far = kinds_lib.PLATE_RADIUS - RIM_WIDTH / 2
    p = [far * np.cos(angle), far * np.sin(angle), RIM_HEIGHT / 2]
    part = sapien.Pose(p, [np.cos(angle / 2), 0, 0, np.sin(angle / 2)])
    builder.add_box_collision(part, half)
    builder.add_box_visual(part, half, material=material)
  builder.set_initial_pose(sapien.Pose([0, 0, 0]))
  return builder.build_kinematic(name='plate')


def _object_builder(scene, kind: str):
  """The builder of a kind's shape, in its color."""
  color, shape = kind.split()
  material = sapien.render.RenderMaterial(
    base_color=[*kinds_lib.COLORS[color], 1]
  )
  builder = scene.create_actor_builder()
  x, y, z = half = kinds_lib.half_size(kind)
  upright = sapien.Pose(q=[0.7071068, 0, 0.7071068, 0])
  if shape == 'ball':
    builder.add_sphere_collision(radius=x)
    builder.add_sphere_visual(radius=x, material=material)
  elif shape == 'cylinder':
    builder.add_cylinder_collision(upright, radius=x, half_length=z)
    builder.add_cylinder_visual(
      upright, radius=x, half_length=z, material=material
    )
  elif shape == 'capsule':  # Along x.
    size = {'radius': y, 'half_length': x - y}
    builder.add_capsule_collision(**size)
    builder.add_capsule_visual(**size, material=material)
  else:
    builder.add_box_collision(half_size=half)
    builder.add_box_visual(half_size=half, material=material)
  return builder
