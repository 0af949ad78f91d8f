"""The plate, the kinds of objects to be put on it, and their instructions.

Neither ManiSkill nor JAX is imported: workers and gin files name kinds, too.
"""

from collections.abc import Sequence
import functools

TASK = 'PutOnPlate-v1'  # Its name among ManiSkill's tasks.
COLORS = {
  'red': (0.80, 0.08, 0.08),
  'green': (0.10, 0.55, 0.15),
  'blue': (0.08, 0.20, 0.80),
  'yellow': (0.90, 0.75, 0.05),
  'purple': (0.45, 0.12, 0.60),
}
# Half of the box around a shape, as it lies on the table: length, width and
# height, in meters. The hand opens to 0.08, and grasps across the width.
HALF_SIZE = {
  'cube': (0.02, 0.02, 0.02),
  'ball': (0.022, 0.022, 0.022),
  'cylinder': (0.02, 0.02, 0.03),
  'brick': (0.035, 0.018, 0.018),
  'capsule': (0.038, 0.018, 0.018),
}
SHAPES = tuple(HALF_SIZE)
PLATE_RADIUS, PLATE_FLOOR = 0.07, 0.006  # The floor of the plate is so high.
ALL = tuple(f'{color} {shape}' for shape in SHAPES for color in COLORS)


def _is_held_out(number: int) -> bool:
  """Whether a kind is not trained on, by its place in `ALL`.

  Of each shape and of each color, one or two kinds are: nine of 25, as many as
  in RLinf's scene.
  """
  shape, color = divmod(number, len(COLORS))
  return color == shape or color == shape + 1


HELD_OUT = tuple(x for i, x in enumerate(ALL) if _is_held_out(i))
TRAIN = tuple(x for x in ALL if x not in HELD_OUT)
SETS = {'train': TRAIN, 'held_out': HELD_OUT, 'all': ALL}


def named(kinds: str | Sequence[str] | None) -> tuple[str, ...]:
  """The kinds of a set, or those given by their names.

  Args:
    kinds: 'train', 'held_out', 'all', or names such as 'red cube'; None for
      'train'.

  Raises:
    ValueError: for an unknown set or kind, one that is given twice, or without
      any kind.
  """
  if kinds is None:
    return TRAIN
  if isinstance(kinds, str):
    if kinds not in SETS:
      raise ValueError(
        f'There is no set of kinds {kinds!r}, but {", ".join(SETS)}: name one '
        'of them, or give a tuple of kinds.'
      )
    return SETS[kinds]
  if unknown := [kind for kind in kinds if kind not in ALL]:
    raise ValueError(
      f'There is no object {unknown[0]!r}: give a color ({", ".join(COLORS)}) '
      f'and a shape ({", ".join(SHAPES)}), such as {ALL[0]!r}.'
    )
  if len({*kinds}) < len(kinds):
    twice = next(kind for kind in kinds if [*kinds].count(kind) > 1)
    raise ValueError(
      f'{twice!r} is given more than once: give each kind of object once.'
    )
  if not kinds:
    raise ValueError('No kind of object is given: name at least one.')
  return tuple(kinds)


def number_of_episode(seed, num_kinds: int):
  """The place, among the kinds given, of the object of an episode.

  Adjacent seeds have the kinds in turn, so an evaluation has all of them
  equally often, or one more of some.

  Args:
    seed: of the episode, or an array of them.
    num_kinds: how many kinds are given.
  """
  return seed % num_kinds


def half_size(kind: str) -> tuple[float, float, float]:
  """Half of the length, width and height of an object."""
  return HALF_SIZE[kind.split()[1]]


def instruction(kind: str) -> str:
  """The instruction to put an object on the plate."""
  return f'put the {kind} on the plate'


def scored(made, kinds: str | Sequence[str] | None):
  """An Env whose evaluations report the success with each kind of object.

  Args:
    made: the Env of a pool of environments with these kinds.
    kinds: as for `named`.
  """
  names = named(kinds)
  return made._replace(
    tasks=names, task=functools.partial(_kind, len(names)), task_group_size=0
  )


def _kind(num_kinds: int, token_B3):
  """The number of the kind in each environment's first episode."""
  return number_of_episode(token_B3[:, 2], num_kinds)
