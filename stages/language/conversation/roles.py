"""Roles of an episode, such as a solver and a critic.

Each role is a row, with a prompt of its own and what the environment says to
it, so that masks, log-probabilities and losses are those of any row. A group
are the rows of one role of one problem, with which its advantage compares:
rewards are normalized within (problem, role), as in Dr. MAS (arXiv:2602.08847).
SPIRAL (arXiv:2506.24119) has a moving average for each role in the place of the
group's mean.

Rows are laid out [N, R, G]: problem, role, row within the group.
"""

from collections.abc import Mapping, Sequence
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

import stages


class Cast(NamedTuple):
  """The roles of a batch of rows.

  Attributes:
    names: of the roles; () where the policy has one role.
    group_size: G, rows of one role of one problem.
    learned: 1 for each role whose tokens are learned.
  """

  names: tuple[str, ...] = ()
  group_size: int = 1
  learned: tuple[float, ...] = (1.0,)

  @property
  def rows(self) -> int:
    """R · G, the rows of a problem; 1 where there is one role."""
    return len(self.names) * self.group_size or 1


SINGLE = Cast()


def cast(
  names: Sequence[str], group_size: int, learned: Sequence[str] | None
) -> Cast:
  """The roles of a batch.

  Args:
    names: of the roles; () where the policy has one role.
    group_size: rows of one role of one problem.
    learned: the roles whose tokens are learned; None for all.

  Raises:
    ValueError: for `learned` that are not among the names.
  """
  if learned is None:
    return Cast(tuple(names), group_size, (1.0,) * max(1, len(names)))
  unknown = sorted(set(learned) - set(names))
  if unknown or not learned:
    raise ValueError(
      f'Only the roles {[*learned]} are to be learned, and those of the '
      f'environment are {[*names]}: name one of them at least, or leave '
      'learned out for all.'
    )
  return Cast(
    tuple(names), group_size, tuple(float(name in learned) for name in names)
  )


def role_of_row(cast: Cast, B: int):
  """The number of each row's role, [B]."""
  if not cast.names:
    return jnp.zeros(B, jnp.int32)
  return jnp.arange(B) // cast.group_size % len(cast.names)


def is_learned(cast: Cast, like_B):
  """1 in rows whose tokens are learned, else 0."""
  learned_R = jnp.array(cast.learned, like_B.dtype)
  return learned_R[role_of_row(cast, like_B.shape[0])]


def of_role(cast: Cast, role: int, x):
  """`x` [B, …], with that of one role's row in all rows of its episode."""
  if not cast.names:
    return x
  rows = _by_role(cast, x)
  return jnp.broadcast_to(rows[:, role : role + 1], rows.shape).reshape(x.shape)


def rows_of(cast: Cast, role: int, x):
  """The rows of one role of `x` [B, …], with one R-th of its rows."""
  rows = _by_role(cast, x)[:, role]
  return rows.reshape(-1, *rows.shape[2:])


def split(cast: Cast) -> stages.Stage:
  """Returns a stage `*rows -> rows of each role`, a list of as many trees."""

  def run(*rows):
    return [
      jax.tree.map(functools.partial(rows_of, cast, role), rows)
      for role in range(len(cast.names))
    ]

  return stages.Stage(run, 'by_role', 'batch')


def terms(cast: Cast, of_row: Mapping, reward_B) -> dict:
  """Numbers of episodes to log, the same in all rows of an episode.

  They are the sums over its rows, and by the name of each role its reward, and
  `NAME_turns`. Without roles, they are those of the rows.

  Args:
    cast: the roles.
    of_row: numbers of each row by name, with `turns`.
    reward_B: the reward of each row.
  """
  if not cast.names:
    return dict(of_row)

  def total(x_B):
    x_NRG = _by_role(cast, x_B)
    x_NRG = jnp.broadcast_to(x_NRG.sum(1, keepdims=True), x_NRG.shape)
    return x_NRG.reshape(x_B.shape)

  out = {name: total(x_B) for name, x_B in of_row.items()}
  for i, name in enumerate(cast.names):
    out[name] = of_role(cast, i, reward_B)
    out[f'{name}_turns'] = of_role(cast, i, of_row['turns'])
  return out


def _by_role(cast: Cast, x):
  """`x` [B, …] as [N, R, G, …]."""
  R, G = len(cast.names), cast.group_size
  return x.reshape(-1, R, G, *x.shape[1:])
