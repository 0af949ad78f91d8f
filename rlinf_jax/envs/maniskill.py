"""ManiSkill 3 as an `Env`: its tasks by state or camera images, on CPUs.

PhysX on a CPU holds one scene per environment, so environments are spread over
several processes. Cameras render on a GPU, or on a CPU through a software
Vulkan device. For ManiSkill's vectorized simulation on a GPU see `vector`.
"""

from collections.abc import Callable, Mapping, Sequence
import functools
import gc
import math
from typing import Any, NamedTuple

import numpy as np

from rlinf_jax.envs import maniskill_drawing, simulator, task_turns
from rlinf_jax.envs import settings as settings_lib
from rlinf_jax.envs.put_on_plate import kinds as kinds_lib

# Instructions of ManiSkill's own tasks; those of an episode are asked of it.
INSTRUCTIONS = {
  'PutCarrotOnPlateInScene-v1': 'put carrot on plate',
  'PutEggplantInBasketScene-v1': 'put eggplant into yellow basket',
  'PutSpoonOnTableClothInScene-v1': 'put the spoon on the towel',
  'StackGreenCubeOnYellowCubeBakedTexInScene-v1': (
    'stack the green block on the yellow block'
  ),
}


@settings_lib.passes_settings_to(lambda: make)
def env(
  task: str,
  num_envs: simulator.PositiveInt,
  num_processes: simulator.PositiveInt = 1,
  *,
  kinds: str | Sequence[str] | None = None,
  instruction: str | None = None,
  instructions: Callable[[Sequence[str]], Any] | None = None,
  **settings,
):
  """An Env of `num_envs` environments of a task, in processes of their own.

  Of 'PutOnPlate-v1', evaluations report the success with each kind of object.

  Args:
    task: such as 'PushCube-v1'.
    num_envs: how many environments.
    num_processes: to spread them over.
    kinds: of objects, as for `make`.
    instruction: what is to be done, in words, in every episode; None for what
      the task says of each.
    instructions: encodes texts as tokens, such as `instructions.pi05`.
      Observations with images then have those of their episode under 'prompt'.
    **settings: those of `rlinf_jax.envs.processes.pool.EnvPool` by
      their names there, all others of `make`.

  Raises:
    ValueError: for an instruction without an encoder, and for an encoder
      without an instruction where the task says none.
  """
  from rlinf_jax.envs import env_pool  # Not in a worker: it imports JAX.

  if instruction is not None and instructions is None:
    raise ValueError(
      f'{task!r} has the instruction {instruction!r} and no encoder: bind '
      '`instructions`, too, or neither.'
    )
  texts = _texts(task, kinds) if instruction is None else [instruction]
  if instructions is not None and not texts:
    raise ValueError(
      f'{task!r} does not say what is to be done: give it an `instruction`.'
    )
  if instructions is not None:
    rows = task_turns.prompts(instructions, texts)
    settings['prompts'] = {
      text: {name: x[i] for name, x in rows.items()}
      for i, text in enumerate(texts)
    }
  settings |= {'task': task, 'kinds': kinds, 'instruction': instruction}
  made = env_pool.env(make, num_envs, num_processes, **settings)
  return kinds_lib.scored(made, kinds) if task == kinds_lib.TASK else made


def _texts(task: str, kinds: str | Sequence[str] | None) -> list[str]:
  """All that a task may say is to be done; nothing if it says none."""
  if task == kinds_lib.TASK:
    return [kinds_lib.instruction(x) for x in kinds_lib.named(kinds)]
  return [INSTRUCTIONS[task]] if task in INSTRUCTIONS else []


def make(
  index: int,
  task: str,
  *,
  control_mode: str = 'pd_joint_delta_pos',
  reward_mode: str = 'normalized_dense',
  horizon: simulator.PositiveInt | None = None,
  kinds: str | Sequence[str] | None = None,
  images: bool = False,
  image_size: simulator.PositiveInt = 128,
  fast_rendering: bool = False,
  video: bool = False,
  instruction: str | None = None,
  prompts: Mapping[str, Mapping[str, np.ndarray]] | None = None,
  **settings,
) -> simulator.Environment:
  """Builds one environment; those of a task do not depend on the index.

  The observation is one vector, the full state. With `images` it is a dict:
  'image' by camera, 'state' of the robot alone, and, where there is an
  instruction, its tokens under 'prompt', or without `prompts` 'instruction',
  UTF-8 bytes padded with zeros.

  Args:
    index: of the environment.
    task: such as 'PushCube-v1', or 'PutOnPlate-v1', see `put_on_plate.scene`.
    control_mode: ManiSkill's name of how actions move the robot.
    reward_mode: 'normalized_dense', at most 1 a step, 'dense', 'sparse', or
      one of the task's own.
    horizon: steps after which an episode is truncated; None for the task's own.
    kinds: of objects in 'PutOnPlate-v1': 'train', 'held_out', 'all', or names;
      None for 'train', and for other tasks.
    images: whether observations have images of the task's cameras.
    image_size: their edge, in pixels. They are drawn where they are read: of a
      chunk of actions, after the last one.
    fast_rendering: whether the arm is drawn by its collision shapes, which have
      a few hundred corners a link in place of some ten thousand. Where a CPU
      draws, a picture takes a quarter of the time.
    video: whether evaluations are recorded, by a camera of the task that is
      not the robot's. Where nothing can render, there is no video.
    instruction: as for `env`.
    prompts: tokens of instructions and their mask, by their text; None for
      none.
    **settings: further arguments of ManiSkill's environments, such as
      `num_distractors` of 'PutOnPlate-v1'.

  Raises:
    UnavailableError: if ManiSkill, the task, its assets or a renderer are
      missing, or the task says what `prompts` do not have.
    ValueError: for kinds of objects in another task.
  """
  del index
  registration = _installed(task)
  _freeze_modules()
  no_rendering = maniskill_drawing.no_rendering()
  if no_rendering and images:
    raise simulator.UnavailableError(
      f'{no_rendering}. Without one there are tasks by state.'
    )
  if task not in registration.REGISTERED_ENVS:
    raise simulator.UnavailableError(
      f'ManiSkill has no task {task!r}, but {_nearest(task, registration)}.'
    )
  horizon = horizon or registration.REGISTERED_ENVS[task].max_episode_steps
  if horizon is None:
    raise simulator.UnavailableError(
      f'Episodes of {task!r} have no limit of steps: give it a `horizon`.'
    )
  if task == kinds_lib.TASK:
    settings['kinds'] = kinds_lib.named(kinds)
  elif kinds is not None:
    raise ValueError(
      f'{task!r} has no kinds of objects, and {kinds!r} are given: bind '
      '`kinds = None`.'
    )
  draws = images or (video and not no_rendering)
  env = registration.make(
    task,
    num_envs=1,
    control_mode=control_mode,
    reward_mode=reward_mode,
    sim_backend='physx_cpu',
    obs_mode='rgb' if images else 'state',
    **(maniskill_drawing.settings(draws, image_size) | settings),
  )
  if fast_rendering and draws:
    maniskill_drawing.draw_collision_shapes(env)
  told = Instruction(env, instruction, prompts) if images else None
  return ManiSkill(env, horizon, video, told)


class Instruction(NamedTuple):
  """The instruction in observations of an environment.

  Attributes:
    env: ManiSkill's environment.
    text: the instruction of every episode; None for what the environment says.
    prompts: as for `make`.
  """

  env: Any
  text: str | None
  prompts: Mapping[str, Mapping[str, np.ndarray]] | None

  def obs(self) -> simulator.Tree:
    """The part of the running episode's observations; empty without a text.

    Raises:
      UnavailableError: for a text without tokens.
    """
    ask = getattr(self.env, 'get_language_instruction', None)
    text = ask()[0] if self.text is None and ask else self.text
    if text is None:
      return {}
    if self.prompts is None:
      return {'instruction': simulator.instruction_bytes(text)}
    if text not in self.prompts:
      raise simulator.UnavailableError(
        f'The task says {text!r}, and tokens are given of {[*self.prompts]}: '
        'give the text as `instruction`.'
      )
    return {'prompt': dict(self.prompts[text])}


class ManiSkill:
  """A ManiSkill environment behind the `simulator.Environment` interface."""

  def __init__(
    self,
    env: Any,
    horizon: int,
    video: bool,
    instruction: Instruction | None = None,
  ):
    """Reads the spaces.

    Args:
      env: ManiSkill's.
      horizon: maximum steps of an episode.
      video: whether it is rendered for people.
      instruction: a part of each observation, which is then a dict; None for
        none.
    """
    self._env, self._time, self._instruction = env, 0, instruction
    self._instruction_obs = instruction.obs() if instruction else {}
    space = env.single_action_space
    size = maniskill_drawing.VIDEO_SIZE
    image = simulator.Array((size, size, 3), 'uint8')
    self.spec = simulator.Spec(
      obs=self._with_instruction(
        _obs_arrays(env.single_observation_space),
        lambda x: simulator.Array(x.shape, x.dtype.name),
      ),
      low=space.low,
      high=space.high,
      horizon=horizon,
      image=image if video else None,
    )

  def reset(self, seed: int) -> simulator.Tree:
    self._time = 0
    obs, _ = self._env.reset(seed=seed)
    if self._instruction:
      self._instruction_obs = self._instruction.obs()
    return self._with_instruction(_obs(obs))

  def step(self, action_A: np.ndarray) -> simulator.Step:
    obs, step = self._step(action_A)
    return step._replace(obs=self._with_instruction(_obs(obs)))

  def advance(self, action_A: np.ndarray) -> simulator.Step:
    with maniskill_drawing.no_pictures(self._env):
      _, step = self._step(action_A)
    if not (step.terminated or step.truncated):
      return step
    # Without `info`, ManiSkill would evaluate the step a second time.
    obs = self._env.get_obs(self._info)
    return step._replace(obs=self._with_instruction(_obs(obs)))

  def _step(self, action_A: np.ndarray) -> tuple[Any, simulator.Step]:
    """ManiSkill's observation, and the step without one."""
    obs, reward, terminated, _, self._info = self._env.step(action_A)
    self._time += 1
    return obs, simulator.Step(
      obs=None,
      reward=float(reward[0]),
      terminated=bool(terminated[0]),
      truncated=self._time >= self.spec.horizon,
      success=bool(self._info.get('success', (False,))[0]),
    )

  def render(self) -> np.ndarray:
    cameras = self._env.scene.human_render_cameras
    missing = maniskill_drawing.no_rendering()
    if missing or not cameras:
      raise simulator.UnavailableError(
        missing or 'the task has no camera for people'
      )
    return self._env.render_rgb_array(next(iter(cameras)))[0].numpy()

  def close(self):
    self._env.close()

  def _with_instruction(
    self, obs: simulator.Tree, of=lambda x: x
  ) -> simulator.Tree:
    """An observation with the instruction, each array of which is `of` it."""
    if not self._instruction_obs:
      return obs
    leaves = simulator.leaves(self._instruction_obs)
    return obs | simulator.tree({path: of(x) for path, x in leaves.items()})


def _obs_arrays(space) -> simulator.Tree:
  """The observation space as a tree of `simulator.Array`."""
  if not isinstance(space, Mapping):
    return simulator.Array(space.shape, 'float32')
  robot, images = _parts(space)
  numbers = sum(math.prod(x.shape) for x in robot)
  return {
    'image': {
      camera: simulator.Array(x.shape, 'uint8') for camera, x in images.items()
    },
    'state': simulator.Array((numbers,), 'float32'),
  }


def _obs(obs) -> simulator.Tree:
  """The observation of the only environment of a batch, in NumPy."""
  if not isinstance(obs, Mapping):
    return obs[0].numpy()
  robot, images = _parts(obs)
  numbers = [x[0].numpy().ravel() for x in robot]
  return {
    'image': {camera: x[0].numpy() for camera, x in images.items()},
    'state': np.concatenate(numbers, dtype=np.float32),
  }


def _parts(tree: Mapping) -> tuple[list, dict[str, Any]]:
  """Arrays of the robot's state, and images by camera."""
  robot = {k: x for k, x in tree.items() if k in ('agent', 'extra')}
  images = {name: x['rgb'] for name, x in tree['sensor_data'].items()}
  return [*simulator.leaves(robot).values()], images


def _installed(task: str):
  """ManiSkill's registry of tasks.

  Raises:
    UnavailableError: if ManiSkill is missing.
  """
  try:
    import mani_skill.envs  # noqa: F401 It registers tasks.
    from mani_skill.utils import download_asset, registration

    from rlinf_jax.envs.put_on_plate import scene  # noqa: F401 Likewise.
  except ImportError as error:
    raise simulator.UnavailableError(
      f'{task!r} needs ManiSkill ({error}): pip install '
      '"rlinf-jax[maniskill]", after a torch of your choice.'
    ) from None

  # ManiSkill would ask whether to download missing assets, or download them
  # without asking. A failed download leaves an empty folder, which counts as
  # downloaded from then on. So downloads raise instead.
  def refuse(source, *args, **kwargs):
    raise simulator.UnavailableError(
      f'{task!r} needs assets that come apart from ManiSkill: '
      f'{source.output_dir / source.target_path} is not there. `python -m '
      f'mani_skill.utils.download_asset {task}` downloads them from '
      f'{source.hf_repo_id or source.url}; MS_ASSET_DIR says where they lie.'
    )

  download_asset.prompt_yes_no = lambda message: True
  download_asset.download = refuse
  return registration


@functools.cache
def _freeze_modules():
  """Keeps garbage collections from visiting what has been imported so far.

  ManiSkill collects whenever it builds a scene, which a reset may do. Visiting
  the objects of PyTorch and others took four fifths of such a reset.
  """
  gc.collect()
  gc.freeze()


def _nearest(task: str, registration) -> str:
  """Names of tasks that resemble a name."""
  import difflib

  near = difflib.get_close_matches(task, registration.REGISTERED_ENVS, 3, 0.3)
  return ', '.join(near)
