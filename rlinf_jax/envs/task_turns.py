"""Several tasks in one pool of environments, which have them in turn.

Environment i has task ⌊i / G⌋, modulo the number of tasks, in groups of G.
Worker processes import this module, so it imports no JAX.
"""

from collections.abc import Callable, Sequence
import functools
from typing import Any, NamedTuple

import numpy as np


class Turns(NamedTuple):
  """An order of tasks, which adjacent environments have in turn.

  Attributes:
    num_tasks: n, how many are given.
    group_size: G, adjacent environments of one task, such as GRPO's groups.
  """

  num_tasks: int = 1
  group_size: int = 1

  def task(self, index):
    """The place, among the tasks given, of that of an environment.

    Args:
      index: of the environment, or an array of them.
    """
    return index // self.group_size % self.num_tasks

  def scene(self, seed, num_scenes: int):
    """The number of the scene in which the episode of a seed starts.

    In an evaluation, adjacent environments have the seeds s, s + 1, … So of
    each run of n · G seeds, a task gets G, and the scene goes by the number of
    the attempt, ⌊s / (n · G)⌋ · G + s mod G: by s alone, a task would start in
    few of its scenes. Environments that share a seed, as GRPO's groups do,
    start in one scene.

    Args:
      seed: s, of the episode, or an array of them.
      num_scenes: scenes of the task.
    """
    n, G = self
    return (seed // (n * G) * G + seed % G) % num_scenes

  def check_equal(self, num_envs: int):
    """Refuses environments of which some tasks would have more than others.

    Raises:
      ValueError: if the number of environments is no multiple.
    """
    n, G = self
    if num_envs % (n * G):
      raise ValueError(
        f'{num_envs} environments are no multiple of {n} tasks in groups of '
        f'{G}, so an evaluation would start in some scenes twice and in others '
        'never: give a multiple (EVAL_ENVIRONMENTS in gin), or bind '
        'equal_tasks = False.'
      )


def with_names(made, given: Sequence[str], turns: Turns, *, equal_tasks: bool):
  """An Env whose evaluations report the success in each task by its name.

  Args:
    made: the Env of the pool; it is returned as it is if all have one task.
    given: names of the tasks that environments have in turn.
    turns: how environments have them.
    equal_tasks: whether evaluations are refused in which some tasks would have
      more episodes than others.
  """
  names = [*dict.fromkeys(given)]
  if len(names) == 1:
    return made
  number_N = np.array([names.index(name) for name in given], np.int32)
  return made._replace(
    tasks=tuple(names),
    task=functools.partial(_task, number_N, turns),
    task_group_size=turns.group_size,
    equal_rows=turns.num_tasks * turns.group_size if equal_tasks else 1,
  )


def _task(number_N: np.ndarray, turns: Turns, token_B3):
  """The number of each environment's task, among those with a name.

  Args:
    number_N: of the tasks that environments have in turn.
    turns: how environments have them.
    token_B3: tokens, which begin with the number of their environment.
  """
  return number_N[turns.task(token_B3[:, 0])]


def prompts(
  instructions: Callable[[Sequence[str]], Any], texts: Sequence[str]
) -> dict[str, np.ndarray]:
  """Tokens and mask of texts, one a row, as a worker process gets them."""
  prompt = instructions(texts)
  return {name: np.asarray(x) for name, x in prompt._asdict().items()}
