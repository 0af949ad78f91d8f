"""When a call in slots stops that ends before all of its rows do.

Without slots, all rows get a token in each iteration, and a call stops after
the first one from which, by the lengths of the completions, it should not go
on. In slots, rows start at different times. So the lengths that are known bound
the number of those iterations, and each row is decoded up to the bound. It is
the number itself once all rows have ended or have as many new tokens. What a
row has beyond it is discarded then. So slots and devices change no token.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from stages import base


class Order(NamedTuple):
  """The division of the rows of a call between devices.

  Parts of groups are dealt to devices in turns, so that each device has as many
  of the first rows of a call, which are continued and mostly long.

  Attributes:
    axes: mesh axes that divide rows.
    devices: number of devices that do.
    part: adjacent rows that stay together.
    first: indices of the leading rows in the order in which they are dealt;
      None for the order in which they come.
    back: the inverse of that order. It is made before rows are divided, as each
      device needs it for its part of them.
  """

  axes: tuple[str, ...]
  devices: int
  part: int
  first: Array | None = None
  back: Array | None = None

  def dealt(self, rows: Any) -> Any:
    """The rows of a tree of arrays, those of the first device first."""
    return jax.tree.map(
      lambda x: self._turned(_led_by(x, self.first), -1, self.devices), rows
    )

  def restored(self, rows: Any) -> Any:
    """The rows of a tree of arrays that were dealt, in their first order."""
    return jax.tree.map(
      lambda x: _led_by(self._turned(x, self.devices, -1), self.back), rows
    )

  def _turned(self, x, *shape: int):
    parts = x.reshape(*shape, self.part, *x.shape[1:])
    return jnp.swapaxes(parts, 0, 1).reshape(x.shape)

  def on_each(self, rows: int) -> int:
    """Of the first `rows` of a call, the most that a device has."""
    return -(-rows // (self.part * self.devices)) * self.part

  def gathered(self, x_B):
    """Numbers of the rows of all devices, in their first order."""
    if self.devices == 1:
      return x_B
    return self.restored(jax.lax.all_gather(x_B, self.axes, tiled=True))

  def largest(self, x):
    """The largest of the numbers that the devices have."""
    return x if self.devices == 1 else jax.lax.pmax(x, self.axes)


def _led_by(x, first):
  """Puts the leading rows of `x` in the order `first`."""
  if first is None:
    return x
  return jnp.concatenate([x[first], x[len(first) :]])


class Stopping(NamedTuple):
  """Bounds on the tokens of rows, and on the iterations of a call.

  Attributes:
    most_B: new tokens of each row of a device, if the call would not stop:
      those of rows that have ended, and of others as many as they have room
      for.
    limit: most iterations of decoding without slots.
    busy: the most unfinished rows that any device has in its slots.
  """

  most_B: Array
  limit: Array
  busy: Array


class Rule(NamedTuple):
  """When to stop, by the rows of all devices.

  Attributes:
    should_continue: `open_B -> bool`, as in `generate.resume`. If it is false
      for some rows, it is so for a part of them.
    order: how rows are divided.
    length: most tokens of a row.
  """

  should_continue: Callable[[Array], Array]
  order: Order
  length: int

  def begin(self, most_B) -> Stopping:
    """Returns the bounds when no row has ended, given the room of each."""
    return Stopping(most_B, self._limit(most_B), jnp.zeros((), jnp.int32))

  def after_ends(self, known: Stopping, row_M, ended_M, new_M) -> Stopping:
    """Returns the bounds once some rows have ended.

    Args:
      known: before.
      row_M: rows in the slots.
      ended_M: those that have ended.
      new_M: tokens of these rows that are new.
    """
    B = known.most_B.shape[0]
    at_M = jnp.where(ended_M, row_M, B)
    most_B = known.most_B.at[at_M].set(new_M, mode='drop')
    return known._replace(most_B=most_B, limit=self._limit(most_B))

  def _limit(self, most_B):
    """The first iteration from which not to go on, by bisection."""
    most_B = self.order.gathered(most_B)
    low, high = jnp.int32(0), jnp.int32(self.length)
    for _ in range(self.length.bit_length()):
      middle = (low + high) // 2
      goes_on = self.should_continue(most_B > middle)
      low = jnp.where(goes_on, middle + 1, low)
      high = jnp.where(goes_on, high, middle)
    return low


def cut(completions: base.Completions, length_B, limit) -> base.Completions:
  """Completions without the tokens that exceed a number of new ones.

  Args:
    completions: the rows.
    length_B: tokens that they had before the call.
    limit: most new tokens of a row.
  """
  action, logp, mask, alive = completions
  most_B1 = (length_B + limit)[:, None]
  is_kept_BT = jnp.arange(mask.shape[1])[None] < most_B1
  return base.Completions(
    jnp.where(is_kept_BT, action, 0),
    jnp.where(is_kept_BT, logp, 0),
    jnp.where(is_kept_BT, mask, 0),
    alive | (mask.sum(1) > most_B1[:, 0]),
  )
