"""The interface of one simulator, in NumPy, as a worker process steps it.

Neither this module nor `worker` imports JAX: a worker process is a simulator
and little else.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple, Protocol

import annotated_types
import numpy as np

INSTRUCTION_SIZE = 128  # Bytes of an instruction in an observation.
Tree = Any  # An array, or a dict of trees by name.
# As `stages.ranges.PositiveInt`, whose package imports JAX.
PositiveInt = Annotated[int, annotated_types.Ge(1)]


class Array(NamedTuple):
  """Shape and dtype of an array."""

  shape: tuple[int, ...]
  dtype: str


class Spec(NamedTuple):
  """Observation and action spaces of an environment.

  Attributes:
    obs: a tree of `Array`, without rows.
    low: lower bounds of actions, [A].
    high: upper bounds of actions, [A].
    horizon: maximum steps of an episode.
    image: of what `render` returns; None without a `render`.
    choices: as `Env.action_choices`.
  """

  obs: Tree
  low: np.ndarray
  high: np.ndarray
  horizon: int
  image: Array | None = None
  choices: tuple[int, ...] = ()


class Step(NamedTuple):
  """Result of one action.

  Attributes:
    obs: a tree of arrays; of `advance`, None unless the episode has ended.
    reward: a number.
    terminated: the task has ended, in success or failure.
    truncated: something else ended the episode, such as a time limit.
    success: the task is solved at this moment.
  """

  obs: Tree
  reward: float
  terminated: bool
  truncated: bool
  success: bool


class Environment(Protocol):
  """A simulator of one scene, which does not reset by itself.

  Equal seeds and actions must give equal observations: they are how an
  environment is restored when its process has died.

  It may have `render() -> uint8 [H, W, 3]`, a frame for people, if its spec has
  an `image`. It is called between steps and must change nothing; if it raises,
  there is no video, and the run continues.

  It may have `advance(action_A) -> Step`, which is `step` without an
  observation. It takes the steps of a chunk of actions before the last one, so
  that pictures that no policy reads need not be drawn.
  """

  spec: Spec

  def reset(self, seed: int) -> Tree:
    """Starts the episode of a seed in [0, 2³¹); returns an observation."""

  def step(self, action_A: np.ndarray) -> Step:
    """Takes an action."""

  def close(self):
    """Frees its resources."""


class UnavailableError(RuntimeError):
  """A package or asset is missing; the message says which and how to get it."""


# `index, **settings -> Environment`: builds the environment of an index.
Make = Callable[..., Environment]


def advance(env: Environment, action_A: np.ndarray) -> Step:
  """Takes an action after which no policy looks, unless it ends the episode."""
  return getattr(env, 'advance', env.step)(action_A)


def episode_seed(seed: int, call: int, attempt: int = 0) -> int:
  """The seed of the episode that starts before a call.

  Args:
    seed: of the environment; its first episode uses it unchanged.
    call: call count of the environment.
    attempt: failed attempts to start this episode.
  """
  if call == attempt == 0:
    return seed
  words = np.random.SeedSequence([seed, call, attempt]).generate_state(1)
  return int(words[0] >> 1)


def instruction_bytes(text: str) -> np.ndarray:
  """The bytes of an instruction in UTF-8, padded with zeros.

  Raises:
    UnavailableError: for more bytes than an observation has room for.
  """
  row = text.encode()
  if len(row) > INSTRUCTION_SIZE:
    raise UnavailableError(
      f'The instruction {text!r:.60} has {len(row)} bytes, and observations '
      f'have room for {INSTRUCTION_SIZE}: give a shorter one, or '
      '`instructions`, which encodes it as tokens.'
    )
  return np.frombuffer(row.ljust(INSTRUCTION_SIZE, b'\0'), np.uint8)


def leaves(tree: Tree, path: str = '') -> dict[str, Any]:
  """Leaves by their path, such as 'image/front'.

  Raises:
    ValueError: if two have the same path.
  """
  if not isinstance(tree, Mapping):
    return {path: tree}
  found = {}
  for name, child in tree.items():
    some = leaves(child, f'{path}/{name}' if path else name)
    if same := sorted(found.keys() & some.keys()):
      raise ValueError(
        f'Two parts of observations have the path {same[0]!r}: give them '
        'different names.'
      )
    found |= some
  return found


def tree(by_path: Mapping[str, Any]) -> Tree:
  """The inverse of `leaves`.

  Raises:
    ValueError: if one path is the beginning of another.
  """
  if list(by_path) == ['']:
    return by_path['']
  root: dict[str, Any] = {}
  for path, leaf in by_path.items():
    *parents, name = path.split('/')
    node = root
    for i, parent in enumerate(parents, 1):
      node = node.setdefault(parent, {})
      if (outer := '/'.join(parents[:i])) in by_path:
        raise ValueError(
          f'Observations have {outer!r} and {path!r}, and a part cannot hold '
          'another: give them different names.'
        )
    node[name] = leaf
  return root
