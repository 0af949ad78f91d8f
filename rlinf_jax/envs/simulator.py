"""What a worker steps: one environment, in NumPy.

Nothing here or in `worker` imports JAX: a worker process is a simulator and
little else.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

Tree = Any  # An array, or a dict of trees by name.


class Array(NamedTuple):
  """What an array looks like before there is one."""

  shape: tuple[int, ...]
  dtype: str


class Spec(NamedTuple):
  """What an environment shows, and what it can be told to do.

  Attributes:
    obs: a tree of `Array`, without rows.
    low: least action [A].
    high: greatest action [A].
    horizon: most steps of an episode.
    picture: what `draw` returns; None for what has no `draw`.
  """

  obs: Tree
  low: np.ndarray
  high: np.ndarray
  horizon: int
  picture: Array | None = None


class Step(NamedTuple):
  """What came of one action.

  Attributes:
    obs: a tree of arrays.
    reward: a number.
    terminated: the task has ended, well or badly: nothing follows.
    truncated: something else ended the episode, such as a limit of time.
    success: the task is accomplished now.
  """

  obs: Tree
  reward: float
  terminated: bool
  truncated: bool
  success: bool


class Environment(Protocol):
  """A simulator of one scene, which does not begin anew by itself.

  Equal seeds and actions must give equal observations: an environment whose
  process died is brought back by them.

  It may have `draw() -> uint8 [H, W, 3]`, how it looks now, for people, if its
  spec says what size that is. It is called between steps and changes nothing;
  where it raises, there is no video, and all else goes on.
  """

  spec: Spec

  def reset(self, seed: int) -> Tree:
    """Begins the episode of a seed in [0, 2³¹)."""

  def step(self, action_A: np.ndarray) -> Step:
    """Acts once."""

  def close(self):
    """Frees what it holds."""


class UnavailableError(RuntimeError):
  """A package or an asset is missing; the message says which and from where."""


Make = Callable[[int], Environment]  # Of an environment's index.


def episode_seed(seed: int, call: int, attempt: int = 0) -> int:
  """The seed of the episode which an environment begins before a call.

  Args:
    seed: of the environment; its first episode has it as it is.
    call: how often the environment has been stepped.
    attempt: how many episodes failed to begin here.
  """
  if call == attempt == 0:
    return seed
  words = np.random.SeedSequence([seed, call, attempt]).generate_state(1)
  return int(words[0] >> 1)


def leaves(tree: Tree, path: str = '') -> dict[str, Any]:
  """Leaves by their path, such as 'image/front'."""
  if not isinstance(tree, Mapping):
    return {path: tree}
  found = {}
  for name, child in tree.items():
    found |= leaves(child, f'{path}/{name}' if path else name)
  return found


def tree(by_path: Mapping[str, Any]) -> Tree:
  """Undoes `leaves`."""
  if list(by_path) == ['']:
    return by_path['']
  made: dict[str, Any] = {}
  for path, leaf in by_path.items():
    *above, name = path.split('/')
    at = made
    for folder in above:
      at = at.setdefault(folder, {})
    at[name] = leaf
  return made
