"""What was done and what came of it, kept to be learned from again.

A ring of so many rows: the newest overwrites the oldest. Rows are drawn with
replacement, all alike, each by a key of its own. A `Replay` is carried like any
other state, and whoever puts rows into it uses it up, so that its memory is
written where it lies.
"""

import pathlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int
import numpy as np

from stages import base, core


class Transition(NamedTuple):
  """Steps of environments, in any order.

  Attributes:
    obs: what was seen before.
    env_action: what the environment was told.
    reward: what followed; of a chunk of n steps, Σₖ γᵏ rₖ.
    discount: what comes after counts by: γⁿ, zero only where the episode
      terminated.
    next_obs: what was seen after, before anything began anew.
  """

  obs: Any
  env_action: Float[Array, 'N ...']
  reward: Float[Array, ' N']
  discount: Float[Array, ' N']
  next_obs: Any


class Replay(NamedTuple):
  """The last of all transitions.

  Attributes:
    rows: of them, [Y, ...]; those beyond `filled` are nothing yet.
    next: where the next is put.
    filled: how many there are.
  """

  rows: Transition
  next: Int[Array, '']
  filled: Int[Array, '']


class Sample(NamedTuple):
  """Rows that were drawn, and luck for what is tried on them."""

  row: Transition
  key: base.Key


def empty(like: Transition, capacity: int) -> Replay:
  """Room for so many rows; `like` is one, as shapes."""
  rows = jax.tree.map(lambda x: jnp.zeros((capacity, *x.shape), x.dtype), like)
  return Replay(rows, jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))


def put(replay: Replay, new: Transition, kept_N) -> Replay:
  """Adds those of `new` where `kept_N` is not zero, the first of them first.

  There may be no more of them than there is room.
  """
  Y, N = (jax.tree.leaves(x)[0].shape[0] for x in (replay.rows, new))
  if N > Y:
    raise ValueError(
      f'{N} transitions at a time do not fit in a replay of {Y}: give it '
      'more capacity.'
    )
  kept_N = kept_N > 0
  place_N = (replay.next + jnp.cumsum(kept_N, dtype=jnp.int32) - 1) % Y
  place_N = jnp.where(kept_N, place_N, Y)  # Y is nowhere.
  rows = jax.tree.map(
    lambda old, x: old.at[place_N].set(x, mode='drop'), replay.rows, new
  )
  count = kept_N.sum(dtype=jnp.int32)
  return Replay(
    rows, (replay.next + count) % Y, jnp.minimum(replay.filled + count, Y)
  )


def draw(
  replay: Replay, prior: Transition | tuple[()], key, n: int, batch: int
) -> Sample:
  """Rows for `n` minibatches of `batch`, one after the other.

  Args:
    replay: with at least one row.
    prior: what others have done. If there is any, the second half of every
      minibatch is drawn from it, which is RLPD's symmetric sampling
      (arXiv:2302.02348, section 4.1).
    key: of the step.
    n: how many minibatches.
    batch: rows of each.
  """
  key = jax.random.fold_in(key, core.REPLAY)
  id_N = jnp.arange(n * batch)
  key_N = jax.vmap(jax.random.fold_in, (None, 0))(key, id_N)
  key_N2 = jax.vmap(jax.random.split)(key_N)

  def pick(key_N, count):
    at = lambda key: jax.random.randint(key, (), 0, count, jnp.int32)
    return jax.vmap(at)(key_N)

  if not prior:
    at_N = pick(key_N2[:, 0], replay.filled)
    row = jax.tree.map(lambda x: x[at_N], replay.rows)
    return Sample(row, key_N2[:, 1])
  if batch % 2:
    raise ValueError(
      f'A minibatch of {batch} rows has no halves: make it even, as one half '
      'is drawn from prior data.'
    )
  halves = key_N2[:, 0].reshape(n, 2, batch // 2)
  count = jax.tree.leaves(prior)[0].shape[0]
  here, there = (
    pick(halves[:, i].reshape(-1), many).reshape(n, -1)
    for i, many in enumerate((replay.filled, count))
  )

  def both(ours, theirs):
    rows = jnp.concatenate([ours[here], theirs[there]], 1)
    return rows.reshape(-1, *rows.shape[2:])

  return Sample(jax.tree.map(both, replay.rows, prior), key_N2[:, 1])


def write(path: str | pathlib.Path, rows: Transition):
  """Writes transitions as a file of NumPy arrays, whole or not at all.

  It says where episodes terminated, and not how what comes after counts.
  """
  path = pathlib.Path(path)
  arrays = rows._asdict()
  arrays['terminated'] = np.asarray(arrays.pop('discount')) == 0
  part = path.with_name(f'{path.name}.part')
  with part.open('wb') as file:
    np.savez(file, **{name: np.asarray(x) for name, x in arrays.items()})
  part.replace(path)


def read(
  path: str | pathlib.Path,
  like: Transition,
  discount: float,
  always: bool = False,
):
  """What `write` has written.

  Args:
    path: of the file.
    like: one transition, as shapes.
    discount: γ, by which what comes after counts.
    always: whether it counts after a termination, too.

  Raises:
    ValueError: if it is of another world.
  """
  path = pathlib.Path(path)
  if not path.is_file():
    raise FileNotFoundError(
      f'There are no demonstrations at {path}: give a file that '
      '`stages.replay.write` has written.'
    )
  with np.load(path) as file:
    arrays = dict(file)
  if arrays.keys() == {'obs', 'action'}:
    raise ValueError(
      f'{path} says what was done, for a clone, and not what came of it: to '
      'learn from rewards give what `stages.replay.write` has written.'
    )
  want = {name: shape.shape for name, shape in like._asdict().items()}
  want['terminated'] = want.pop('discount')
  got = {name: x.shape[1:] for name, x in arrays.items()}
  if want != got:
    name = min(n for n in want | got if want.get(n) != got.get(n))
    raise ValueError(
      f'{path} holds demonstrations of another world: a row of {name} is '
      f'{got.get(name)} there and should be {want.get(name)}.'
    )
  ends = arrays.pop('terminated') * (not always)
  arrays['discount'] = discount * (1.0 - ends)
  return jax.tree.map(
    lambda x, shape: jnp.asarray(x, shape.dtype), Transition(**arrays), like
  )
