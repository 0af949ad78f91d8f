"""LIBERO as an `Env`: manipulation tasks with fixed initial states.

Environments have the tasks in turn, see `task_turns`. Of as many seeds in a row
as n tasks have initial states, each task has every state once. With one task,
seeds 0 … 49 are the benchmark's own fifty attempts.
"""

from collections.abc import Callable, Mapping, Sequence
import functools
import pathlib
from typing import Any, NamedTuple

import numpy as np

from rlinf_jax.envs import libero_files, mujoco_drawing, simulator, task_turns
from rlinf_jax.envs import settings as settings_lib

CAMERAS = {'front': 'agentview', 'wrist': 'robot0_eye_in_hand'}
ARM = 'robot0_proprio-state'
OBJECTS = 'object-state'
SETTLE_STEPS = 10  # Steps after a reset until objects lie still.
VIDEO_SIZE = 160  # Pixels along each edge of a frame for people.
HOLD = np.array([0, 0, 0, 0, 0, 0, -1.0])  # No motion; the gripper open.


@settings_lib.passes_settings_to(lambda: make)
def env(
  suite: str,
  num_envs: simulator.PositiveInt,
  num_processes: simulator.PositiveInt = 1,
  *,
  task_ids: Sequence[int] = (0,),
  group_size: simulator.PositiveInt = 1,
  equal_tasks: bool = False,
  instructions: Callable[[Sequence[str]], Any] | None = None,
  **settings,
):
  """An Env of `num_envs` environments of a suite, in processes of their own.

  Of several tasks, evaluations report the success in each, by its name.

  Args:
    suite: such as 'libero_spatial'.
    num_envs: how many environments.
    num_processes: to spread them over.
    task_ids: numbers of the suite's tasks.
    group_size: adjacent environments of one task, such as GRPO's groups.
    equal_tasks: refuses a number of environments, or of seeds in a held-out
      batch, of which some tasks would have more than others. In an evaluation,
      those tasks would start in some initial states twice, and others never in
      some.
    instructions: encodes texts as tokens, such as `instructions.pi0`.
      Observations with images then have the tokens of their task under
      'prompt', in place of its bytes.
    **settings: those of `rlinf_jax.envs.processes.pool.EnvPool` by
      their names there, all others of `make`.

  Raises:
    ValueError: as `equal_tasks` says.
  """
  turns = task_turns.Turns(len(task_ids), group_size)
  if equal_tasks:
    turns.check_equal(num_envs)
  from rlinf_jax.envs import env_pool  # Not in a worker: it imports JAX.

  if instructions is not None:
    texts = [libero_files.instruction(x) for x in libero_files.tasks(suite)]
    settings['prompts'] = task_turns.prompts(instructions, texts)
  settings |= {
    'suite': suite,
    'task_ids': task_ids,
    'group_size': group_size,
  }
  made = env_pool.env(make, num_envs, num_processes, **settings)
  names = libero_files.tasks(suite)
  given = [names[task] for task in task_ids]
  return task_turns.with_names(made, given, turns, equal_tasks=equal_tasks)


def make(
  index: int,
  suite: str,
  *,
  task_ids: Sequence[int] = (0,),
  group_size: simulator.PositiveInt = 1,
  horizon: simulator.PositiveInt = 300,
  cameras: Sequence[str] = (),
  image_size: simulator.PositiveInt = 128,
  fast_rendering: bool = True,
  as_published: bool = False,
  gripper_opens: bool = False,
  prompts: Mapping[str, np.ndarray] | None = None,
) -> simulator.Environment:
  """Builds one environment.

  The observation is one vector, the state of the arm and of all objects. Its
  length depends on the number of objects, so tasks can be mixed only where that
  agrees. With `cameras` it is a dict: 'state' of the arm alone, 'image' by
  camera, and 'instruction', UTF-8 bytes padded with zeros. Images are drawn
  where they are read: of a chunk of actions, after the last one.

  Args:
    index: of the environment; it selects the task.
    suite: such as 'libero_spatial'.
    task_ids: numbers of the suite's tasks.
    group_size: adjacent environments of one task, such as GRPO's groups.
    horizon: steps after which an episode is truncated.
    cameras: of 'front' and 'wrist', those whose images are observed.
    image_size: the edge of images, in pixels.
    fast_rendering: whether to leave out shadows and reflections.
    as_published: whether images and state are as in the data sets on which
      OpenVLA-OFT and π0 were trained: images are turned by 180°, also left to
      right, and the state is the hand's position, its axis times its angle, and
      both fingers.
    gripper_opens: whether the last number of an action opens the gripper above
      ½ and closes it below, as in OpenVLA's version of the data sets. Otherwise
      −1 opens it, and 1 closes it.
    prompts: tokens of the suite's tasks and their mask, one a row, which
      replace 'instruction'; None for none.
  """
  names = libero_files.tasks(suite)
  turns = task_turns.Turns(len(task_ids), group_size)
  task = task_ids[turns.task(index)]
  if not 0 <= task < len(names):
    raise simulator.UnavailableError(
      f'{suite!r} has tasks 0 … {len(names) - 1}, and no task {task}.'
    )
  prompt = {key: x[task] for key, x in (prompts or {}).items()}
  if unknown := sorted({*cameras} - CAMERAS.keys()):
    raise simulator.UnavailableError(
      f'LIBERO has the cameras {" and ".join(CAMERAS)}, and no {unknown[0]!r}.'
    )
  view = View(tuple(cameras), image_size, fast_rendering, as_published, prompt)
  return Libero(suite, names[task], horizon, view, gripper_opens, turns)


class View(NamedTuple):
  """Contents of an observation; fields are arguments of `make`.

  Attributes:
    cameras: that it has images of; with none, it is the state of all objects.
    image_size: the edge of images, in pixels.
    fast_rendering: whether shadows and reflections are left out.
    as_published: whether it is as in published data sets.
    prompt: tokens of the task and their mask; empty for its text.
  """

  cameras: tuple[str, ...]
  image_size: int
  fast_rendering: bool
  as_published: bool
  prompt: dict[str, np.ndarray]


class Libero:
  """A LIBERO environment behind the `simulator.Environment` interface."""

  def __init__(
    self,
    suite: str,
    name: str,
    horizon: int,
    view: View,
    gripper_opens: bool = False,
    turns: task_turns.Turns = task_turns.Turns(),
  ):
    """Builds the scene and reads its initial states."""
    import libero.libero as package
    from libero.libero import envs

    root = pathlib.Path(package.__file__).parent
    self._states = libero_files.initial_states(suite, name)
    self._env = envs.env_wrapper.ControlEnv(
      str(root / 'bddl_files' / suite / f'{name}.bddl'),
      use_camera_obs=bool(view.cameras),
      has_offscreen_renderer=bool(view.cameras),
      camera_names=[CAMERAS[name] for name in view.cameras],
      camera_heights=view.image_size,
      camera_widths=view.image_size,
      ignore_done=True,  # `step` ends episodes.
      hard_reset=False,  # Build the scene once; only its state is reset.
    )
    self._view, self._time, self._draws = view, 0, True
    for camera in view.cameras:
      self._draw_when_read(f'{CAMERAS[camera]}_image')
    self._text = libero_files.instruction(name)
    low, high = map(np.float32, self._env.env.action_spec)
    self._gripper_opens, self._turns = gripper_opens, turns
    if gripper_opens:
      low[-1] = 0.0
    self._renderer = None
    self.spec = simulator.Spec(
      obs=_obs_arrays(self.reset(0)),
      low=low,
      high=high,
      horizon=horizon,
      image=simulator.Array((VIDEO_SIZE, VIDEO_SIZE, 3), 'uint8'),
    )

  def reset(self, seed: int) -> simulator.Tree:
    self._time, self._draws = 0, False
    np.random.seed(seed)  # LIBERO samples from the global generator.
    reset_scene(self._env)
    state = self._states[self._turns.scene(seed, len(self._states))]
    obs = self._env.set_init_state(state)
    if self._view.cameras and self._view.fast_rendering:
      mujoco_drawing.leave_out_shadows(
        self._env.sim._render_context_offscreen.scn
      )
    for left in reversed(range(SETTLE_STEPS)):
      self._draws = left == 0
      obs, *_ = self._env.step(HOLD)
    return self._obs(obs)

  def step(self, action_A: np.ndarray) -> simulator.Step:
    return self._step(action_A, draws=True)

  def advance(self, action_A: np.ndarray) -> simulator.Step:
    return self._step(action_A, draws=self._time + 1 == self.spec.horizon)

  def _step(self, action_A: np.ndarray, draws: bool) -> simulator.Step:
    self._draws = draws
    if self._gripper_opens:
      closes = -np.sign(2.0 * action_A[-1:] - 1.0)
      action_A = np.concatenate([action_A[:-1], closes])
    obs, reward, _, _ = self._env.step(action_A)
    self._time += 1
    success = bool(self._env.check_success())
    truncated = self._time >= self.spec.horizon
    if success and not draws:  # The episode ends sooner than it was to.
      self._draws = True
      obs = self._env.env._get_observations(force_update=True)
    ended = success or truncated
    seen = self._obs(obs) if draws or ended else None
    return simulator.Step(seen, reward, success, truncated, success)

  def render(self) -> np.ndarray:
    import mujoco

    model, data = self._env.sim.model._model, self._env.sim.data._data
    if self._renderer is None:
      self._renderer = mujoco_drawing.renderer(
        model, VIDEO_SIZE, fast=self._view.fast_rendering
      )
    options = mujoco.MjvOption()
    options.geomgroup[0] = 0  # Hides collision shapes.
    self._renderer.update_scene(data, _viewpoint(model, data), options)
    return self._renderer.render()

  def close(self):
    if self._renderer is not None:
      self._renderer.close()
    self._env.close()

  def _obs(self, obs: Mapping[str, np.ndarray]) -> simulator.Tree:
    if not self._view.cameras:
      return np.concatenate([obs[ARM], obs[OBJECTS]]).astype(np.float32)
    published = self._view.as_published
    state = _published_state(obs) if published else obs[ARM]
    # LIBERO returns them upside down.
    turned = np.s_[::-1, ::-1] if published else np.s_[::-1]
    if self._view.prompt:
      words = {'prompt': self._view.prompt}
    else:
      words = {'instruction': simulator.instruction_bytes(self._text)}
    return {
      'state': state.astype(np.float32),
      'image': {
        name: obs[f'{CAMERAS[name]}_image'][turned]
        for name in self._view.cameras
      },
    } | words

  def _draw_when_read(self, name: str):
    """Has a camera draw only while `_draws`, at the moments that it would."""
    draw = self._env.env._observables[name]._sensor
    last = None

    @functools.wraps(draw)
    def seen(cache):
      nonlocal last
      if self._draws or last is None:
        last = draw(cache)
      return last

    self._env.env.modify_observable(name, 'sensor', seen)


def reset_scene(env):
  """Resets an environment of LIBERO, also what its own `reset` leaves.

  Fingers move from where those of the episode before were to go.
  """
  env.reset()
  for robot in env.robots:
    robot.gripper.current_action = np.zeros(robot.gripper.dof)


def _published_state(obs: Mapping[str, np.ndarray]) -> np.ndarray:
  """Position, axis times angle, and fingers, [8].

  An angle is below 2π as in OpenVLA-OFT and openpi, not below π.
  """
  *axis, cos = obs['robot0_eef_quat']
  cos = np.clip(cos, -1.0, 1.0)
  sin = np.sqrt(1.0 - cos**2)
  angle = 2.0 * np.arccos(cos) / sin if sin > 1e-9 else 0.0
  return np.concatenate(
    [
      obs['robot0_eef_pos'],
      np.multiply(axis, angle),
      obs['robot0_gripper_qpos'],
    ]
  )


def _viewpoint(model, data):
  """A camera for people: the front camera's view from further above."""
  import mujoco

  front = model.camera(CAMERAS['front']).id
  ahead_X = -data.cam_xmat[front].reshape(3, 3)[:, 2]
  far = 1.2
  viewpoint = mujoco.MjvCamera()
  viewpoint.lookat[:] = data.cam_xpos[front] + far * ahead_X + [0, 0, 0.12]
  viewpoint.distance = 1.1 * far
  viewpoint.azimuth = np.degrees(np.arctan2(ahead_X[1], ahead_X[0]))
  viewpoint.elevation = np.degrees(np.arcsin(ahead_X[2]))
  return viewpoint


def _obs_arrays(obs) -> simulator.Tree:
  by_path = simulator.leaves(obs)
  return simulator.tree(
    {
      path: simulator.Array(x.shape, x.dtype.name)
      for path, x in by_path.items()
    }
  )
