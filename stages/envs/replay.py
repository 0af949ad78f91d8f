"""A replay buffer: a ring of transitions, sampled with replacement.

The newest transitions overwrite the oldest. Rows are drawn uniformly, each with
a key of its own. A `Replay` is carried like any other state; `put` consumes it,
so that its memory is updated in place.
"""

import pathlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int
import numpy as np

from stages import base, core, tree_paths


class Transition(NamedTuple):
  """Steps of environments, in any order.

  Attributes:
    obs: observation before the step.
    env_action: action the environment was given, within its bounds.
    reward: reward of the step; of a chunk of n steps, Σₖ γᵏ rₖ.
    discount: factor of the value of what follows: γⁿ, and zero where the
      episode terminated.
    next_obs: observation after the step, before any reset.
  """

  obs: Any
  env_action: Float[Array, 'N ...']
  reward: Float[Array, ' N']
  discount: Float[Array, ' N']
  next_obs: Any


class Replay(NamedTuple):
  """The ring buffer.

  Attributes:
    rows: [Y, ...]; rows from `filled` on are unset.
    next: where the next transition is written.
    filled: number of transitions held.
  """

  rows: Transition
  next: Int[Array, '']
  filled: Int[Array, '']


class Sample(NamedTuple):
  """Sampled transitions, and a key per row for what is computed on them."""

  row: Transition
  key: base.Key


def empty(like: Transition, capacity: int) -> Replay:
  """A buffer of `capacity` rows; `like` has the shapes of one."""
  rows = jax.tree.map(lambda x: jnp.zeros((capacity, *x.shape), x.dtype), like)
  return Replay(rows, jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))


def put(replay: Replay, new: Transition, kept_N) -> Replay:
  """Appends the rows of `new` where `kept_N` is not zero, in order.

  Raises:
    ValueError: if `new` has more rows than the buffer.
  """
  Y, N = (jax.tree.leaves(x)[0].shape[0] for x in (replay.rows, new))
  if N > Y:
    raise ValueError(
      f'{N} transitions at a time do not fit in a replay of {Y}: give it '
      'more capacity.'
    )
  kept_N = kept_N > 0
  row_N = (replay.next + jnp.cumsum(kept_N, dtype=jnp.int32) - 1) % Y
  row_N = jnp.where(kept_N, row_N, Y)  # Writes to row Y are dropped.
  rows = jax.tree.map(
    lambda old, x: old.at[row_N].set(x, mode='drop'), replay.rows, new
  )
  count = kept_N.sum(dtype=jnp.int32)
  return Replay(
    rows, (replay.next + count) % Y, jnp.minimum(replay.filled + count, Y)
  )


def draw(
  replay: Replay, prior: Transition | tuple[()], key, n: int, batch: int
) -> Sample:
  """Samples `n` minibatches of `batch` rows, one after the other: [n · batch].

  Args:
    replay: with at least one row.
    prior: offline data, or (). If there is any, the second half of every
      minibatch is drawn from it, which is RLPD's symmetric sampling
      (arXiv:2302.02348, section 4.1).
    key: of the step.
    n: number of minibatches.
    batch: rows of each; even with offline data.
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
      'is drawn from offline data.'
    )
  halves = key_N2[:, 0].reshape(n, 2, batch // 2)
  count = jax.tree.leaves(prior)[0].shape[0]
  online, offline = (
    pick(halves[:, i].reshape(-1), size).reshape(n, -1)
    for i, size in enumerate((replay.filled, count))
  )

  def both(replayed, given):
    rows = jnp.concatenate([replayed[online], given[offline]], 1)
    return rows.reshape(-1, *rows.shape[2:])

  return Sample(jax.tree.map(both, replay.rows, prior), key_N2[:, 1])


def write(path: str | pathlib.Path, rows: Transition):
  """Writes transitions as a file of NumPy arrays, atomically.

  Of observations with several parts, each is an array of its own, such as
  `obs/state`, as in the files of `demonstrations.write`. Instead of discounts,
  which are a choice of the learner, the file stores `terminated`.
  """
  path = pathlib.Path(path)
  arrays = tree_paths.flatten(rows)
  arrays['terminated'] = np.asarray(arrays.pop('discount')) == 0
  part = path.with_name(f'{path.name}.part')
  with part.open('wb') as file:
    np.savez(file, **{name: np.asarray(x) for name, x in arrays.items()})
  part.replace(path)


def read(path: str | pathlib.Path, like: Transition, discount: float):
  """Reads what `write` has written.

  Args:
    path: of the file.
    like: shapes of one transition.
    discount: γ.

  Raises:
    FileNotFoundError: if there is no such file.
    ValueError: if its arrays are of another environment, or it holds
      demonstrations for cloning.
  """
  path = pathlib.Path(path)
  if not path.is_file():
    raise FileNotFoundError(
      f'There are no transitions at {path}: give a file that '
      '`stages.envs.replay.write` has written.'
    )
  with np.load(path) as file:
    arrays = dict(file)
  if {name.split('/')[0] for name in arrays} == {'obs', 'action'}:
    raise ValueError(
      f'{path} holds demonstrations for cloning, without rewards: give a file '
      'that `stages.envs.replay.write` has written.'
    )
  shapes = tree_paths.flatten(like)
  want = {name: shape.shape for name, shape in shapes.items()}
  want['terminated'] = want.pop('discount')
  got = {name: x.shape[1:] for name, x in arrays.items()}
  if want != got:
    name = min(n for n in want | got if want.get(n) != got.get(n))
    raise ValueError(
      f'{path} holds transitions of another environment: a row of {name} is '
      f'{got.get(name)} there and should be {want.get(name)}.'
    )
  arrays['discount'] = discount * (1.0 - arrays.pop('terminated'))
  leaves = [jnp.asarray(arrays[name], x.dtype) for name, x in shapes.items()]
  return jax.tree.unflatten(jax.tree.structure(like), leaves)
