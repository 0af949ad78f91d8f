"""Meta-World as an `Env`: fifty tasks of one arm, from states or pictures.

env = metaworld.env(('reach-v3',), num_envs=16, num_processes=2)

Environments have the tasks in turn, see `task_turns`. A task has fifty scenes,
which differ in where things and the goal are. With one task, the episode of a
seed is in the scene of that number, modulo fifty.
"""

from collections.abc import Callable, Mapping, Sequence
import difflib
import os
from typing import Any, Literal, NamedTuple

import numpy as np

from rlinf_jax.envs import gymnasium, mujoco_drawing, simulator, task_turns
from rlinf_jax.envs import settings as settings_lib

SCENES_SEED = 0  # Of the fifty scenes, the same ones in all environments.
MAX_STEPS = 500  # Meta-World steps no further.
VIDEO_SIZE = 160  # Pixels along each edge of a frame for people.
# The camera and its place in the data sets on which models were fine-tuned,
# such as LeRobot's of all fifty tasks; its picture is upside down.
CAMERA, CAMERA_POSITION = 'corner2', (0.75, 0.075, 0.7)
STATE, ACTION = 39, 4  # Numbers of an observation of states, and of an action.
ARM = 4  # Numbers of the hand's position and the gripper, which come first.


@settings_lib.passes_settings_to(lambda: make)
def env(
  tasks: Sequence[str],
  num_envs: simulator.PositiveInt,
  num_processes: simulator.PositiveInt = 1,
  *,
  group_size: simulator.PositiveInt = 1,
  equal_tasks: bool = False,
  descriptions: Mapping[str, str] | None = None,
  instructions: Callable[[Sequence[str]], Any] | None = None,
  **settings,
):
  """An Env of `num_envs` environments, in processes of their own.

  Of several tasks, evaluations report the success in each, by its name.

  Args:
    tasks: names of tasks, such as 'reach-v3', which environments have in turn.
    num_envs: how many environments.
    num_processes: to spread them over.
    group_size: adjacent environments of one task, such as GRPO's groups.
    equal_tasks: refuses a number of environments, or of seeds in a held-out
      batch, of which some tasks would have more than others. In an evaluation,
      those tasks would start in some scenes twice, and others never in some.
    descriptions: what is to be done, in words, by task. Others have the words
      of their name: 'door-open-v3' is 'door open'.
    instructions: encodes texts as tokens, such as `instructions.pi0`.
      Observations with pictures then have the tokens of their task under
      'prompt', in place of its bytes.
    **settings: those of `rlinf_jax.envs.processes.pool.EnvPool` by
      their names there, all others of `make`.

  Raises:
    ValueError: for `tasks` that are one text, or as `equal_tasks` says.
  """
  from rlinf_jax.envs import env_pool  # Not in a worker: it imports JAX.

  if isinstance(tasks, str):
    raise ValueError(
      f'`tasks` is {tasks!r}, and several are given as a tuple: make it '
      f'({tasks!r},).'
    )
  turns = task_turns.Turns(len(tasks), group_size)
  if equal_tasks:
    turns.check_equal(num_envs)
  if instructions is not None:
    texts = [_description(task, descriptions) for task in tasks]
    settings['prompts'] = task_turns.prompts(instructions, texts)
  settings |= {
    'tasks': tuple(tasks),
    'descriptions': descriptions,
    'group_size': group_size,
  }
  made = env_pool.env(make, num_envs, num_processes, **settings)
  return task_turns.with_names(made, tasks, turns, equal_tasks=equal_tasks)


def _description(task: str, descriptions: Mapping[str, str] | None) -> str:
  """The instruction of a task, in words."""
  words = task.rsplit('-v', 1)[0].replace('-', ' ')
  return (descriptions or {}).get(task, words)


def make(
  index: int,
  tasks: Sequence[str],
  *,
  descriptions: Mapping[str, str] | None = None,
  group_size: simulator.PositiveInt = 1,
  horizon: simulator.PositiveInt = MAX_STEPS,
  settle_steps: int = 0,
  reward: Literal['dense', 'success'] = 'dense',
  terminate: bool = False,
  image_size: simulator.PositiveInt | None = None,
  fast_rendering: bool = False,
  video: bool = False,
  prompts: Mapping[str, np.ndarray] | None = None,
) -> simulator.Environment:
  """Builds one environment.

  The observation is the published one, [39]: hand, gripper and things, now and
  a step before, and the goal. With `image_size` it is a dict: 'state' [4] of
  hand and gripper alone, the picture 'image/front', and 'instruction', UTF-8
  bytes padded with zeros. Pictures are as in the data sets of `CAMERA`, and are
  drawn where they are read: of a chunk of actions, after the last one.

  Args:
    index: of the environment; it selects the task.
    tasks: names of tasks, such as 'reach-v3'.
    descriptions: what is to be done, in words, by task; see `env`.
    group_size: adjacent environments of one task, such as GRPO's groups.
    horizon: steps after which an episode is truncated; 500 as published.
    settle_steps: steps without motion at the start of an episode, which belong
      to none, until things lie still; RLinf has 15.
    reward: 'dense' for Meta-World's, at most 10 a step; 'success' for 1 in each
      step in which the task is solved.
    terminate: whether success ends an episode.
    image_size: the edge of pictures, in pixels; None for states.
    fast_rendering: whether to leave out shadows and reflections, which the
      data sets' pictures have. Where a CPU draws, a picture without them takes
      a sixth of the time.
    video: whether evaluations are recorded.
    prompts: tokens of the tasks and their mask, one a row, which replace
      'instruction'; None for none.

  Raises:
    UnavailableError: if Meta-World is missing, or has no such task as is to be
      run or described, or pictures cannot be drawn.
    ValueError: if an episode has more steps than Meta-World makes.
  """
  turns = task_turns.Turns(len(tasks), group_size)
  number = turns.task(index)
  task = tasks[number]
  if horizon + settle_steps > MAX_STEPS:
    raise ValueError(
      f'Meta-World makes {MAX_STEPS} steps, and an episode has {horizon} after '
      f'{settle_steps} without motion: lower `horizon`.'
    )
  if image_size or video:
    os.environ.setdefault('MUJOCO_GL', 'egl')  # Before MuJoCo is imported.
  check_tasks([task, *(descriptions or {})])
  view = View(
    image_size,
    {name: x[number] for name, x in (prompts or {}).items()},
    _description(task, descriptions),
    fast_rendering,
    video,
  )
  made = _made(task, horizon + settle_steps, terminate, view)
  scenes = made.get_wrapper_attr('tasks')

  def set_scene(seed: int):
    made.unwrapped.set_task(scenes[turns.scene(seed, len(scenes))])

  return MetaWorld(made, set_scene, view, settle_steps, reward == 'success')


class View(NamedTuple):
  """Contents of an observation, and what is drawn for people.

  Attributes:
    image_size: the edge of pictures, in pixels; None for states.
    prompt: tokens of the task and their mask; empty for its text.
    text: what is to be done.
    fast_rendering: whether shadows and reflections are left out.
    video: whether frames are drawn for people.
  """

  image_size: int | None
  prompt: dict[str, np.ndarray]
  text: str
  fast_rendering: bool
  video: bool

  @property
  def size(self) -> int:
    """The edge of what is drawn, in pixels."""
    return self.image_size or VIDEO_SIZE


def check_tasks(tasks: Sequence[str]):
  """Refuses a missing package, and tasks that it does not have.

  Args:
    tasks: names, such as 'reach-v3'.

  Raises:
    UnavailableError: as said.
  """
  try:
    import metaworld
  except ImportError as error:
    raise simulator.UnavailableError(
      f'{tasks[0]!r} needs Meta-World ({error}): pip install '
      '"rlinf-jax[metaworld]".'
    ) from None
  names = metaworld.ALL_V3_ENVIRONMENTS
  for task in tasks:
    if task not in names:
      near = difflib.get_close_matches(task, names, 3, 0.3) or names
      raise simulator.UnavailableError(
        f'Meta-World has no task {task!r}, but {", ".join(near)}.'
      )


def _made(task: str, steps: int, terminate: bool, view: View):
  """The published environment, whose resets keep the scene that is set."""
  import gymnasium as gym

  made = gym.make(
    'Meta-World/MT1',
    env_name=task,
    seed=SCENES_SEED,
    max_episode_steps=steps,
    terminate_on_success=terminate,
    width=view.size,
    height=view.size,
    disable_env_checker=True,  # It warns of bounds that are equal.
  )
  made.unwrapped.model.camera(CAMERA).pos[:] = CAMERA_POSITION
  # Its own resets draw a scene that does not follow from their seed.
  made.get_wrapper_attr('toggle_sample_tasks_on_reset')(False)
  return made


class MetaWorld(gymnasium.Gymnasium):
  """A Meta-World environment behind the `simulator.Environment` interface."""

  def __init__(
    self,
    env: Any,
    set_scene: Callable[[int], None],
    view: View,
    settle_steps: int,
    rewards_success: bool,
  ):
    """Draws the first scene, if there are pictures.

    Args:
      env: the published environment.
      set_scene: sets that of the episode of a seed.
      view: contents of observations.
      settle_steps: steps without motion at the start of an episode.
      rewards_success: whether the reward is 1 where the task is solved.
    """
    self._view, self._settle_steps = view, settle_steps
    self._rewards_success, self._renderer = rewards_success, None
    super().__init__(env, set_scene)
    spec = self.spec._replace(horizon=self.spec.horizon - settle_steps)
    if view.video:
      frame = gymnasium.downsample(np.zeros((view.size, view.size, 3)))
      spec = spec._replace(image=simulator.Array(frame.shape, 'uint8'))
    if view.image_size:
      found = simulator.leaves(self.reset(0))
      arrays = {
        path: simulator.Array(x.shape, x.dtype.name)
        for path, x in found.items()
      }
      spec = spec._replace(obs=simulator.tree(arrays))
    self.spec = spec

  def reset(self, seed: int) -> simulator.Tree:
    obs = super().reset(seed)
    for _ in range(self._settle_steps):
      obs = super().step(np.zeros_like(self._actions.low)).obs
    return self._obs(obs)

  def step(self, action_A: np.ndarray) -> simulator.Step:
    return self._step(action_A, draws=True)

  def advance(self, action_A: np.ndarray) -> simulator.Step:
    return self._step(action_A, draws=False)

  def _step(self, action_A: np.ndarray, draws: bool) -> simulator.Step:
    step = super().step(action_A)
    if self._rewards_success:
      step = step._replace(reward=float(step.success))
    seen = draws or step.terminated or step.truncated
    return step._replace(obs=self._obs(step.obs) if seen else None)

  def render(self) -> np.ndarray:
    return gymnasium.downsample(self._picture())

  def _obs(self, obs_O: np.ndarray) -> simulator.Tree:
    if not self._view.image_size:
      return obs_O
    if self._view.prompt:
      words = {'prompt': self._view.prompt}
    else:
      words = {'instruction': simulator.instruction_bytes(self._view.text)}
    return {'state': obs_O[:ARM], 'image': {'front': self._picture()}} | words

  def close(self):
    if self._renderer is not None:
      self._renderer.close()
    super().close()

  def _picture(self) -> np.ndarray:
    simulation = self._env.unwrapped
    if self._renderer is None:
      # Gymnasium's own draws one environment of a process, and no others.
      self._renderer = mujoco_drawing.renderer(
        simulation.model, self._view.size, fast=self._view.fast_rendering
      )
    self._renderer.update_scene(simulation.data, CAMERA)
    return self._renderer.render()[::-1, ::-1].copy()
