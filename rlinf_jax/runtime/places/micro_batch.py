"""Runs a stage on a few rows at a time within one compiled call.

This bounds the memory of activations. Rows do not mix and sums add up, so only
rounding changes.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp


def in_micro_batches(
  stage,
  rows: int,
  shard: Callable = lambda x: x,
  run: Callable | None = None,
):
  """A function that computes `stage.fn` on `rows` rows at a time.

  Args:
    stage: of grain 'row' or 'sum'.
    rows: rows of a micro-batch; they divide those of the batch.
    shard: lays `x[micro-batch, row, ...]` out with the rows of each micro-batch
      on all devices. (Without it XLA would put each micro-batch on a device of
      its own, and the devices would work one after another.)
    run: the function of the stage; `stage.run` if None.
  """
  run = run or stage.run

  def split(x):
    return shard(x.reshape(x.shape[0] // rows, rows, *x.shape[1:]))

  def fn(*args):
    unbatched = {i: args[i] for i in stage.unbatched}
    batched = {
      i: jax.tree.map(split, arg)
      for i, arg in enumerate(args)
      if i not in unbatched
    }

    def call(part):
      either = unbatched | part
      return run(*(either[i] for i in range(len(args))))

    if stage.grain == 'row':
      out = jax.lax.map(call, batched)
      return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), out)

    def add(carry, part):
      total, is_first = carry
      out = call(part)
      # A sum need not have a zero: the first part replaces the initial value.
      # (Calling it before the loop would compile the stage twice.)
      total = jax.tree.map(
        lambda x, y: jnp.where(is_first, x, y), out, stage.merge(total, out)
      )
      return (total, jnp.zeros((), bool)), None

    shapes = jax.eval_shape(call, jax.tree.map(lambda x: x[0], batched))
    blank = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    (total, _), _ = jax.lax.scan(add, (blank, jnp.ones((), bool)), batched)
    return total

  return fn
