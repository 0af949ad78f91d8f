"""The unit of work: a named pure function."""

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from stages import metrics

# Purposes of keys lie beyond the rows that `keys` folds in.
SHUFFLE = np.uint32(2**32 - 1)
BEGIN = np.uint32(2**32 - 2)
REPLAY = np.uint32(2**32 - 3)
CHOOSE = np.uint32(2**32 - 4)


class Deferred(NamedTuple):
  """What will come of a call that is under way.

  Attributes:
    told: a future, or another `Deferred`.
    then: what is made of its result.
  """

  told: Any
  then: Callable[[Any], Any]

  def result(self) -> Any:
    """Waits for it."""
    return self.then(self.told.result())

  def cancel(self):
    """Lets it be given up: nobody waits."""
    self.told.cancel()

  @property
  def elsewhere(self) -> Sequence[tuple[str, float, float]]:
    """Who has done it, from when to when, by `time.perf_counter`, if known."""
    return getattr(self.told, 'elsewhere', ())


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
      equal runs of rows out, routed and not copied. 'slice': likewise, but any
      rows in any order, as arguments without rows say: all must be there
      before, and what comes out may be cut again. 'batch': not at all.
    unbatched: positions of arguments without rows, such as parameters.
    group_size: rows that must stay together; a cut is at a multiple of so many.
    consumes: positions of arguments that are used up, such as the token of a
      simulator: what goes on is what it returns. They have rows, so that
      cutting the batch cuts them too.
    host: runs outside JAX, on NumPy arrays; what it takes whole, such as
      parameters, it is given as it lies.
    out_shapes: shapes of what a host stage returns, given shapes of what it
      takes.
    asynchronous: a host stage whose function returns a `Deferred` of what it
      returns: it is begun as soon as what it takes is there, and waited for in
        its turn. A
      simulator steps so, while a policy acts on other rows.
  """

  fn: Callable[..., Any]
  name: str
  grain: Literal['row', 'sum', 'split', 'slice', 'batch'] = 'row'
  unbatched: tuple[int, ...] = ()
  group_size: int = 1
  consumes: tuple[int, ...] = ()
  host: bool = False
  out_shapes: Callable[..., Any] | None = None
  asynchronous: bool = False

  def __post_init__(self):
    if self.host and self.out_shapes is None:
      raise ValueError(
        f'Stage {self.name} runs on the host, so nothing can tell the shapes '
        'of what it returns: give it `out_shapes`.'
      )
    if self.asynchronous and not self.host:
      raise ValueError(
        f'Stage {self.name} cannot be begun ahead of its turn: only what runs '
        'on the host can.'
      )
    both = sorted({*self.consumes} & {*self.unbatched})
    if both and self.grain != 'batch':
      raise ValueError(
        f'Stage {self.name} uses up its arguments {both}, which have no rows: '
        'every piece of a batch would use up the same. Give them rows, or call '
        "it grain 'batch'."
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
    """Calls a host stage."""
    return self.end(self.begin(*args), *args)

  def begin(self, *args):
    """Begins a call of a host stage."""
    given = [
      arg if i in self.unbatched else jax.device_get(arg)
      for i, arg in enumerate(args)
    ]
    return self.fn(*given)

  def end(self, begun, *args):
    """Waits for a call, and holds it to the shapes that it promised."""
    made = begun.result() if self.asynchronous else begun
    want, got = jax.tree.flatten(self.out_shapes(*args)), jax.tree.flatten(made)
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
    return (
      self.out_shapes(*args) if self.host else jax.eval_shape(self.run, *args)
    )

  merge = staticmethod(metrics.merge)


def stage(name: str, grain='row', unbatched=(), **kwargs):
  """Decorator form of `Stage`."""
  return lambda fn: Stage(fn, name, grain, unbatched, **kwargs)


@stage('keys', 'batch')
def keys(key, rows):
  """One key a row, by the row's place in the whole batch.

  Cutting, placing or sharding the batch therefore does not change its luck.
  """
  B = jax.tree.leaves(rows)[0].shape[0]
  return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(B))
