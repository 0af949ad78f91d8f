"""Runs a stage a few rows at a time, inside one compiled call, for memory.

Rows do not mix, and sums add up, so this changes rounding and nothing else.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp


def in_micro_batches(stage, rows: int, spread: Callable = lambda x: x):
  """`stage.fn` on `rows` rows at a time; of grain 'row' or 'sum'.

  Args:
    stage: what to run.
    rows: how many rows at once.
    spread: lays `x[micro-batch, row, ...]` out so that the rows of each
      micro-batch are on all devices. (Left alone, a mesh would hold a
      micro-batch a device, and take them in turn.)
  """

  def split(x):
    return spread(x.reshape(x.shape[0] // rows, rows, *x.shape[1:]))

  def fn(*args):
    whole = {i: args[i] for i in stage.unbatched}
    parts = {
      i: jax.tree.map(split, arg)
      for i, arg in enumerate(args)
      if i not in whole
    }

    def call(part):
      return stage.run(*(whole.get(i, part.get(i)) for i in range(len(args))))

    if stage.grain == 'row':
      made = jax.lax.map(call, parts)
      return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), made)

    def add(carry, part):
      total, first = carry
      made = call(part)
      # Not every sum has a zero: the first part replaces what is there. (To
      # call it ahead of the loop would compile the stage twice.)
      total = jax.tree.map(
        lambda x, y: jnp.where(first, x, y), made, stage.merge(total, made)
      )
      return (total, jnp.zeros((), bool)), None

    like = jax.eval_shape(call, jax.tree.map(lambda x: x[0], parts))
    blank = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
    (total, _), _ = jax.lax.scan(add, (blank, jnp.ones((), bool)), parts)
    return total

  return fn
