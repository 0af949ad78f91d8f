"""Minibatches: which rows of a batch share an optimizer step."""

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

import stages
from stages import core

MinibatchBy = Literal['row', 'shuffled', 'arrival']


def minibatches(
  minibatch_by: MinibatchBy,
  num_minibatches: int,
  num_epochs: int,
  group_size: int = 1,
) -> Callable:
  """Returns `key, obs, x, *more -> minibatches`, trees `(x, *more)` of rows.

  `obs` is read only for its number of rows, so that minibatches by 'row' and
  'shuffled' are settled before `x` exists.

  Args:
    minibatch_by: how groups are assigned to minibatches. 'row': in the order of
      the batch. 'shuffled': at random, anew in every epoch. 'arrival': groups
      that end about the same time together, where all are decoded at once; it
      depends on how many tokens a step has sampled of each.
    num_minibatches: minibatches of a batch.
    num_epochs: passes over the batch.
    group_size: adjacent rows that stay together.
  """
  if minibatch_by == 'row':
    parts = split(num_minibatches, group_size)
    return lambda key, obs, *rows: parts(rows) * num_epochs
  take = gather(group_size)
  if minibatch_by == 'shuffled':
    ids = shuffle(num_minibatches, num_epochs, group_size)
    return lambda key, obs, *rows: take(ids(key, obs), rows)
  if minibatch_by == 'arrival':
    ids = by_arrival(num_minibatches, num_epochs, group_size)
    return lambda key, obs, x, *more: take(ids(x.mask, x.arrival), (x, *more))
  raise ValueError(
    f"minibatch_by must be 'row', 'shuffled' or 'arrival', not "
    f'{minibatch_by!r}.'
  )


def split(n: int, group_size: int = 1) -> stages.Stage:
  """Returns a stage that splits rows into `n` equal runs of whole groups."""

  def run(tree):
    B = _num_rows(tree, n, group_size)
    return tuple(
      jax.tree.map(lambda x: x[i * B // n : (i + 1) * B // n], tree)
      for i in range(n)
    )

  return stages.Stage(
    run, 'minibatches', 'split', group_size=group_size, divisible_groups=True
  )


def _num_rows(tree, n: int, group_size: int) -> int:
  """Number of rows; checks that `n` minibatches of whole groups share them."""
  B = jax.tree.leaves(tree)[0].shape[0]
  if B % (n * group_size):
    raise ValueError(
      f'{B} rows cannot be split into {n} minibatches of whole groups of '
      f'{group_size}: make the batch a multiple of {n} groups, which is '
      f'{n * group_size} rows, or num_minibatches smaller (UPDATES in gin).'
    )
  return B


def shuffle(n: int, epochs: int, group_size: int = 1) -> stages.Stage:
  """Assigns groups to `n` minibatches at random, anew in every epoch.

  Returns:
    `key, rows -> id_ENM`: for each epoch, minibatch and row in it, the row's
    position in the batch. Only the number of rows is read, so that minibatches
    are settled before their rows exist. A minibatch is a set: its rows keep the
    order of the batch, so that sums over it do.
  """

  def shuffled_ids(key, rows):
    B = _num_rows(rows, n, group_size)
    key = jax.random.fold_in(key, core.SHUFFLE)
    key_E = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(epochs))
    order = jax.vmap(lambda key: jax.random.permutation(key, B // group_size))
    groups = jnp.sort(order(key_E).reshape(epochs, n, -1))
    return jnp.arange(B).reshape(-1, group_size)[groups].reshape(epochs, n, -1)

  return stages.Stage(shuffled_ids, 'minibatch_ids', 'batch')


def by_arrival(n: int, epochs: int, group_size: int = 1) -> stages.Stage:
  """Assigns groups to `n` minibatches in the order in which they ended.

  A group has ended when its last row has; groups that end at once keep the
  order of the batch.

  Returns:
    `mask_BT, arrival_B -> id_ENM`, as `shuffle`. `arrival_B` is when each row
    ended, in any unit; None for the row's length.
  """

  def ids_by_arrival(mask_BT, arrival_B):
    B = _num_rows(mask_BT, n, group_size)
    end_B = mask_BT.sum(1) if arrival_B is None else arrival_B
    order = jnp.argsort(end_B.reshape(-1, group_size).max(1), stable=True)
    groups = jnp.sort(order.reshape(n, -1))
    ids = jnp.arange(B).reshape(-1, group_size)[groups].reshape(n, -1)
    return jnp.repeat(ids[None], epochs, axis=0)

  return stages.Stage(ids_by_arrival, 'minibatch_ids', 'batch')


def gather(group_size: int = 1) -> stages.Stage:
  """Takes minibatches by their row ids, one after the other.

  Returns:
    `id_ENM, rows -> minibatches`, E · N of them.
  """

  def take(id_ENM, tree):
    minibatch_ids = id_ENM.reshape(-1, id_ENM.shape[-1])
    return tuple(
      jax.tree.map(lambda x: x[row_ids], tree) for row_ids in minibatch_ids
    )

  return stages.Stage(
    take,
    'minibatches',
    'slice',
    unbatched=(0,),
    group_size=group_size,
    divisible_groups=True,
  )
