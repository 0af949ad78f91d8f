"""Shapes of what a function that routes values between stages returns."""

from collections.abc import Callable
from typing import Any

import jax


def of(fn: Callable, *args) -> Any:
  """Shapes of the results of `fn`, given arrays or shapes; no stage is run.

  Args:
    fn: a function that only routes values between stages, as a step does.
    *args: its arguments.

  Returns:
    Its results, with a `jax.ShapeDtypeStruct` in place of each array.
  """
  return jax.tree.map(
    lambda x: x.like, fn(*jax.tree.map(_symbol, args)), is_leaf=_is_symbol
  )


class _Symbol:
  """A symbol of an array, which records no more than its shape."""

  def __init__(self, like: jax.ShapeDtypeStruct):
    self.like = like
    self.shape, self.dtype = like.shape, like.dtype

  def __record__(self, stage, args):
    args = jax.tree.map(lambda x: x.like, args, is_leaf=_is_symbol)
    # A loop returns what it carries.
    made = args[0] if hasattr(stage, 'body') else stage.shapes(*args)
    return jax.tree.map(_symbol, made)


def _symbol(x) -> _Symbol:
  return _Symbol(jax.ShapeDtypeStruct(x.shape, x.dtype))


def _is_symbol(x) -> bool:
  return isinstance(x, _Symbol)
