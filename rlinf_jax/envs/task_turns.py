"""Several tasks in one pool of environments, which have them in turn.

Environment i has task i // `group_size`, modulo the number of tasks. Worker
processes import this module, so it imports no JAX.
"""

from collections.abc import Callable, Sequence
import functools
from typing import Any

import numpy as np


def turn(index, num_tasks: int, group_size: int):
  """The place, among those given, of the task of an environment.

  Args:
    index: of the environment, or an array of them.
    num_tasks: how many are given.
    group_size: adjacent environments of one task, such as GRPO's groups.
  """
  return index // group_size % num_tasks


def scene(seed: int, num_tasks: int, num_scenes: int) -> int:
  """The number of the scene in which the episode of a seed starts.

  Neighboring environments have the seeds s, s + 1, … and different tasks. So a
  task gets every n-th seed of n tasks, and the scene goes by the number of the
  attempt, s // n: by s alone, a task would start in one of n scenes only.

  Args:
    seed: s, of the episode.
    num_tasks: n, which environments have in turn.
    num_scenes: scenes of the task.
  """
  return seed // num_tasks % num_scenes


def check_equal(num_envs: int, num_tasks: int, group_size: int):
  """Refuses environments of which some tasks would have more than others.

  Raises:
    ValueError: if the number of environments is no multiple.
  """
  if num_envs % (num_tasks * group_size):
    raise ValueError(
      f'{num_envs} environments are no multiple of {num_tasks} tasks in groups '
      f'of {group_size}, so an evaluation would start in some scenes twice and '
      'in others never: give a multiple (EVAL_ENVIRONMENTS in '
      'gin), or bind equal_tasks = False.'
    )


def with_names(made, given: Sequence[str], group_size: int):
  """An Env whose evaluations report the success in each task by its name.

  Args:
    made: the Env of the pool; it is returned as it is if all have one task.
    given: names of the tasks that environments have in turn.
    group_size: adjacent environments of one task.
  """
  names = [*dict.fromkeys(given)]
  if len(names) == 1:
    return made
  number_N = np.array([names.index(name) for name in given], np.int32)
  return made._replace(
    tasks=tuple(names), task=functools.partial(_task, number_N, group_size)
  )


def _task(number_N: np.ndarray, group_size: int, token_B3):
  """The number of each environment's task, among those with a name.

  Args:
    number_N: of the tasks that environments have in turn.
    group_size: adjacent environments of one task.
    token_B3: tokens, which begin with the number of their environment.
  """
  return number_N[turn(token_B3[:, 0], len(number_N), group_size)]


def prompts(
  instructions: Callable[[Sequence[str]], Any], texts: Sequence[str]
) -> dict[str, np.ndarray]:
  """Tokens and mask of texts, one a row, as a worker process gets them."""
  prompt = instructions(texts)
  return {name: np.asarray(x) for name, x in prompt._asdict().items()}
