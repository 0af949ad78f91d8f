"""Positions of the plate and of objects, by the seed of an episode."""

import numpy as np

# Positions on the table: from the center, and from other things, in meters.
CENTER, HALF_AREA = np.array([-0.03, 0.0]), np.array([0.1, 0.16])
FROM_PLATE, FROM_OBJECT = 0.125, 0.1
# Of five objects, one draw in 15,000 keeps the distances, which takes some
# 0.4 seconds to find; of seven, fewer than one in a million does.
MOST_OBJECTS = 5


def check_distractors(num_distractors: int, num_kinds: int):
  """Refuses distractors that lack a kind of their own, or a position.

  Args:
    num_distractors: objects beside the one that is named.
    num_kinds: kinds of objects that are given.

  Raises:
    ValueError: as said.
  """
  if not 0 <= num_distractors < num_kinds:
    raise ValueError(
      f'{num_distractors} distractors of kinds other than the object need as '
      f'many further kinds, and {num_kinds} are given: give more kinds, or '
      'fewer distractors.'
    )
  if num_distractors >= MOST_OBJECTS:
    raise ValueError(
      f'{num_distractors} distractors do not fit on the table beside plate and '
      f'object: give at most {MOST_OBJECTS - 1}.'
    )


def draw(seed: int, num_objects: int) -> np.ndarray:
  """Positions and angles of the plate and of objects, [1 + n, 3].

  Args:
    seed: of the episode.
    num_objects: n, at most `MOST_OBJECTS`.
  """
  rng = np.random.default_rng([seed, 1])
  while True:  # About one try in two keeps the distances of one object.
    xy = CENTER + rng.uniform(-HALF_AREA, HALF_AREA, (1 + num_objects, 2))
    yaw = rng.uniform(-np.pi, np.pi, (1 + num_objects, 1))
    far = np.linalg.norm(xy[:, None] - xy[None], axis=-1)
    far[0] -= FROM_PLATE - FROM_OBJECT
    if (far[np.triu_indices(len(far), 1)] >= FROM_OBJECT).all():
      return np.concatenate([xy, yaw], 1)
