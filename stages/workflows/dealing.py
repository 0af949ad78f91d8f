"""Which rows of a batch are learned from together."""

from collections.abc import Callable
from typing import Literal

from stages import stage as stages

Membership = Literal['row', 'shuffled', 'arrival']


def dealing(
  membership: Membership, updates: int, epochs: int, group: int
) -> Callable:
  """Returns `key, obs, x, *more -> minibatches`, trees `(x, *more)` of rows.

  Args:
    membership: of groups in a minibatch. In the order of their 'row', as they
      were asked; 'shuffled' by chance, anew in every epoch; both are settled
      before a token is drawn. Or by 'arrival', those together that end about
      the same time, where all are decoded at once: it follows from how many
      tokens a step has drawn of each.
    updates: minibatches of a batch.
    epochs: how often it is learned from.
    group: adjacent rows that stay together.
  """
  if membership == 'row':
    split = stages.minibatches(updates, group)
    return lambda key, obs, *rows: split(rows) * epochs
  gather = stages.shuffled(group)
  if membership == 'shuffled':
    shuffle = stages.shuffle(updates, epochs, group)
    return lambda key, obs, *rows: gather(shuffle(key, obs), rows)
  if membership == 'arrival':
    arrival = stages.arrival(updates, epochs, group)
    return lambda key, obs, x, *more: gather(
      arrival(x.mask, x.arrival), (x, *more)
    )
  raise ValueError(
    f"Membership {membership!r} is none of 'row', 'shuffled' and 'arrival'."
  )
