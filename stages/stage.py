"""The unit of work: a named pure function."""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from stages import metrics


@dataclasses.dataclass(frozen=True, eq=False)
class Stage:
  """A named pure function.

  Called with arrays, it runs. Called with a value that defines `__record__`,
  it is recorded: the operand decides, as with NumPy's `__array_function__`. A
  stage therefore knows nothing of planners or workers.

  Attributes:
    fn: the function.
    name: what plans, profiles and logs call it.
    grain: how finely its batch may be cut. 'row': rows in, rows out. 'sum':
      rows in, sums out, which `merge` adds up. 'split': rows in, a tuple of
      equal runs of rows out, routed and not copied. 'batch': not at all.
    whole: positions of arguments without rows, such as parameters.
    group: rows that must stay together; a cut is at a multiple of so many.
    host: runs outside JAX, on NumPy arrays.
    like: shapes of what a host stage returns, given shapes of what it takes.
  """

  fn: Callable[..., Any]
  name: str
  grain: Literal['row', 'sum', 'split', 'batch'] = 'row'
  whole: tuple[int, ...] = ()
  group: int = 1
  host: bool = False
  like: Callable[..., Any] | None = None

  def __post_init__(self):
    if self.host and self.like is None:
      raise ValueError(
        f'Stage {self.name} runs on the host, so nothing can tell the shapes '
        'of what it returns: give it `like`.'
      )

  def __call__(self, *args):
    for leaf in jax.tree.leaves(args):
      if hasattr(leaf, '__record__'):
        return leaf.__record__(self, args)
    return self.run(*args)

  @functools.cached_property
  def run(self):
    return self.outside if self.host else jax.jit(self.fn)

  def outside(self, *args):
    """Calls a host stage and holds it to the shapes that it promised."""
    made = self.fn(*jax.device_get(args))
    want, got = jax.tree.flatten(self.like(*args)), jax.tree.flatten(made)
    wants = [(x.shape, x.dtype) for x in want[0]]
    gots = [(np.shape(x), np.asarray(x).dtype) for x in got[0]]
    if (want[1], wants) != (got[1], gots):
      raise TypeError(
        f'Stage {self.name} promised {want[1]} of {wants} and returned '
        f'{got[1]} of {gots}.'
      )
    return made

  def shapes(self, *args):
    """Shapes of what it returns, given shapes of what it takes."""
    return self.like(*args) if self.host else jax.eval_shape(self.run, *args)

  merge = staticmethod(metrics.merge)


def stage(name: str, grain='row', whole=(), **kwargs):
  """Decorator form of `Stage`."""
  return lambda fn: Stage(fn, name, grain, whole, **kwargs)


@stage('keys', 'batch')
def keys(key, rows):
  """One key a row, by the row's place in the whole batch.

  Cutting, placing or sharding the batch therefore does not change its luck.
  """
  B = jax.tree.leaves(rows)[0].shape[0]
  return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(B))


def minibatches(n: int, group: int = 1) -> Stage:
  """Splits a tree of rows into `n` runs of whole groups."""

  def split(tree):
    B = jax.tree.leaves(tree)[0].shape[0]
    if B % (n * group):
      raise ValueError(
        f'{B} rows cannot be split into {n} minibatches of whole groups of '
        f'{group}: the batch must be a multiple of {n * group} rows.'
      )
    return tuple(
      jax.tree.map(lambda x: x[i * B // n : (i + 1) * B // n], tree)
      for i in range(n)
    )

  return Stage(split, 'minibatches', 'split', group=group)
