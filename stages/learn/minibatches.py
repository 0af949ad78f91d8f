"""Minibatches: which rows of a batch share an optimizer step."""

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

import stages
from stages import core

MinibatchBy = Literal['row', 'shuffled', 'arrival']


def minibatches(
  minibatch_by: MinibatchBy, updates: int, epochs: int, group_size: int
) -> Callable:
  """Returns `key, obs, x, *more -> minibatches`, trees `(x, *more)` of rows.

  Args:
    minibatch_by: of groups in a minibatch. In the order of their 'row', as they
      were asked; 'shuffled' by chance, anew in every epoch; both are settled
      before a token is drawn. Or by 'arrival', those together that end about
      the same time, where all are decoded at once: it follows from how many
      tokens a step has drawn of each.
    updates: minibatches of a batch.
    epochs: how often it is learned from.
    group_size: adjacent rows that stay together.
  """
  if minibatch_by == 'row':
    parts = split(updates, group_size)
    return lambda key, obs, *rows: parts(rows) * epochs
  take = gather(group_size)
  if minibatch_by == 'shuffled':
    ids = shuffle(updates, epochs, group_size)
    return lambda key, obs, *rows: take(ids(key, obs), rows)
  if minibatch_by == 'arrival':
    ids = by_arrival(updates, epochs, group_size)
    return lambda key, obs, x, *more: take(ids(x.mask, x.arrival), (x, *more))
  raise ValueError(
    f"minibatch_by={minibatch_by!r} is none of 'row', 'shuffled' and 'arrival'."
  )


def split(n: int, group_size: int = 1) -> stages.Stage:
  """Splits a tree of rows into `n` runs of whole groups."""

  def run(tree):
    B = _whole_groups(tree, n, group_size)
    return tuple(
      jax.tree.map(lambda x: x[i * B // n : (i + 1) * B // n], tree)
      for i in range(n)
    )

  return stages.Stage(run, 'minibatches', 'split', group_size=group_size)


def _whole_groups(tree, n, group_size) -> int:
  """How many rows there are, which `n` minibatches share."""
  B = jax.tree.leaves(tree)[0].shape[0]
  if B % (n * group_size):
    raise ValueError(
      f'{B} rows cannot be split into {n} minibatches of whole groups of '
      f'{group_size}: the batch must be a multiple of {n * group_size} rows.'
    )
  return B


def shuffle(n: int, epochs: int, group_size: int = 1) -> stages.Stage:
  """Deals groups out to `n` minibatches, anew in every epoch.

  Returns:
    `key, rows -> id_ENM`: of each epoch, minibatch and row in it, the place of
    the row in the whole batch. It reads nothing of the rows but how many they
    are, so that it is settled before they are made. A minibatch is a set: its
    rows are in the order of the batch, so that its sums are.
  """

  def deal(key, rows):
    B = _whole_groups(rows, n, group_size)
    key = jax.random.fold_in(key, core.SHUFFLE)
    key_E = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(epochs))
    order = jax.vmap(lambda key: jax.random.permutation(key, B // group_size))
    groups = jnp.sort(order(key_E).reshape(epochs, n, -1))
    return jnp.arange(B).reshape(-1, group_size)[groups].reshape(epochs, n, -1)

  return stages.Stage(deal, 'minibatch_ids', 'batch')


def by_arrival(n: int, epochs: int, group_size: int = 1) -> stages.Stage:
  """Deals groups out to `n` minibatches in the order in which they ended.

  A group has ended when its last row has; of those that end at once, the first
  in the batch is first.

  Returns:
    `mask_BT, arrival_B -> id_ENM`, as `shuffle`; who ended when is `arrival_B`
    in any unit or, where that is None, how long it is.
  """

  def deal(mask_BT, arrival_B):
    B = _whole_groups(mask_BT, n, group_size)
    end_B = mask_BT.sum(1) if arrival_B is None else arrival_B
    order = jnp.argsort(end_B.reshape(-1, group_size).max(1), stable=True)
    groups = jnp.sort(order.reshape(n, -1))
    ids = jnp.arange(B).reshape(-1, group_size)[groups].reshape(n, -1)
    return jnp.repeat(ids[None], epochs, axis=0)

  return stages.Stage(deal, 'minibatch_ids', 'batch')


def gather(group_size: int = 1) -> stages.Stage:
  """Takes the minibatches that were dealt, one after the other.

  Returns:
    `id_ENM, rows -> minibatches`, E · N of them.
  """

  def run(id_ENM, tree):
    runs = id_ENM.reshape(-1, id_ENM.shape[-1])
    return tuple(jax.tree.map(lambda x: x[run], tree) for run in runs)

  return stages.Stage(
    run, 'minibatches', 'slice', unbatched=(0,), group_size=group_size
  )
